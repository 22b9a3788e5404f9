"""How prompts are put together in both styles, and how replies are made safe to stand inside them."""

from __future__ import annotations

import re
import unicodedata

from gradscope.errors import ConfigError
from gradscope.train.episode import Message, Problem, Style
from gradscope.train.grading import visible_text

MAX_COMPACT_FIELD = 24
"""Most characters of one reply inside a later compact prompt."""

_LOOK_ALIKE = "\u2039"
_SPECIAL_TEXT = re.compile(r"<(?=\||/?(?:s|pad|unk|bos|eos|think|tool_call|tool_response)>)")


def statement(problem: Problem, style: Style) -> str:
    """Returns the problem's text for a style.

    Raises:
        ConfigError: The style is compact and the task has no compact text.
    """
    text = problem.text(style)
    if not text:
        raise ConfigError(
            f"problem '{problem.id}' has no {style} text. Set workflow.style=natural, or take another task."
        )
    return text


def compact(role: str, *fields: str) -> tuple[Message, ...]:
    """Returns the compact prompt of a role: its name, then its fields between bars."""
    return (Message("system", role), Message("user", "|".join(fields)))


def natural(instructions: str, *paragraphs: str) -> tuple[Message, ...]:
    """Returns a prompt in sentences: instructions for the role, then paragraphs with the material."""
    return (Message("system", instructions), Message("user", "\n\n".join(paragraphs)))


def generator_prompt(problem: Problem, style: Style) -> tuple[Message, ...]:
    """Returns the prompt of a generator that answers from the problem alone, the same in all workflows."""
    text = statement(problem, style)
    if style == "compact":
        return compact("generator", text)
    return natural(
        "You are the generator: you solve problems carefully, step by step.", text, problem.answer_format
    )


def compact_field(reply: str) -> str:
    """Returns a reply as a compact prompt shows it: at most 24 long, no `|<>` or control characters."""
    kept = (c for c in reply if c not in "|<>" and not unicodedata.category(c).startswith("C"))
    return "".join(kept).strip()[:MAX_COMPACT_FIELD]


def quote(reply: str) -> str:
    """Returns a reply as a natural prompt shows it: without thinking, control characters or special tokens.

    The `<` of text that chat templates treat as a token, such as `<|im_end|>`, becomes a look-alike, so that
    a reply cannot end the turn it is quoted in.
    """
    kept = (c for c in visible_text(reply) if c in "\n\t" or not unicodedata.category(c).startswith("C"))
    return _SPECIAL_TEXT.sub(_LOOK_ALIKE, "".join(kept)).strip() or "(empty)"
