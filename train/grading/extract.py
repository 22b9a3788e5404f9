r"""Finds what a reply offers as its answer: the last `\boxed{}`, the last number, or a closed code fence."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(
    r"(?<![\w.�])[-+]?"  # a sign counts only where no digit or letter stands before it
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3})?(?:/\d+)?(?![\d,.]*�)"
)
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n`]*$", re.MULTILINE)
_ALIASES = {"python": ("python", "python3", "py")}


def visible_text(text: str) -> str:
    """Returns what follows the last closed thinking block; nothing when the thinking never ends."""
    _, closing, after = text.rpartition("</think>")
    return "" if "<think>" in after else (after if closing else text)


def boxes(text: str) -> list[str]:
    r"""Returns the contents of all closed `\boxed{...}` that are not inside another, in order."""
    found: list[str] = []
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                found.append(text[match.end() : position].strip())
                end = position
                break
        else:
            break  # it never closes, and so nothing inside it counts either
    return found


def last_box(text: str) -> str | None:
    r"""Returns the content of the last closed `\boxed{...}` outside thinking, or None."""
    found = boxes(visible_text(text))
    return found[-1] if found else None


def extract_answer(text: str) -> str | None:
    r"""Returns the answer of a reply: its last closed `\boxed{}`, else its last number, else None.

    Text up to the end of a thinking block is not read. A box that never closes is a truncated answer: None.
    """
    visible = visible_text(text)
    found = boxes(visible)
    if found:
        return found[-1] or None
    if _BOX.search(visible):
        return None
    numbers = _NUMBER.findall(visible)
    return numbers[-1] if numbers else None


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Returns (language tag in lower case, content) of each closed fence outside thinking, in order."""
    visible = visible_text(text)
    fences = list(_FENCE.finditer(visible))
    pairs = zip(fences[::2], fences[1::2], strict=False)
    return [
        (opening.group(1).lower(), visible[opening.end() + 1 : closing.start()]) for opening, closing in pairs
    ]


def extract_code(text: str, language: str = "python") -> str | None:
    """Returns the last closed fence tagged with the language, else the last untagged one, else None.

    A fence that never closes is a truncated program and is not returned.
    """
    tags = _ALIASES.get(language.lower(), (language.lower(),))
    blocks = code_blocks(text)
    tagged = [content for tag, content in blocks if tag in tags]
    untagged = [content for tag, content in blocks if not tag]
    found = tagged or untagged
    return found[-1] if found else None
