"""Reads what roles reply: a choice, a verdict, strategies; and whether a reply only copies its prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gradscope.train.episode import Style
from gradscope.train.grading import visible_text
from gradscope.train.grading.extract import boxes

STRATEGY_LETTERS = "LR"
_STANDALONE_DIGIT = re.compile(r"(?<![\w.])[1-9](?![\w]|\.\d)")
_STRATEGY_LINE = re.compile(
    r"^[\s*#>-]*STRATEGY\s*(\d+)\s*[*]*\s*[:.)-]\s*(.+)$", re.IGNORECASE | re.MULTILINE
)
_NUMBERED_LINE = re.compile(r"^\s*[*]*(\d+)\s*[.):]\s*(.+)$", re.MULTILINE)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_VERDICT_LABEL = re.compile(r"^(?:final\s+)?verdict\s*[:=]\s*", re.IGNORECASE)
_MIN_LINE = 10
_MIN_CONTAINED = 40


@dataclass(frozen=True)
class Choice:
    """Which candidate an aggregator picked; `index` counts from 0."""

    index: int
    in_format: bool
    fallback: bool


@dataclass(frozen=True)
class Judgement:
    """What an evaluator says of a solution; `correct` is None where no verdict can be read."""

    correct: bool | None
    feedback: str
    in_format: bool


@dataclass(frozen=True)
class Strategies:
    """The strategies an orchestrator proposes, at least one, at most as many as there are workers."""

    texts: tuple[str, ...]
    in_format: bool
    fallback: bool


def read_choice(reply: str, *, num_candidates: int, style: Style) -> Choice:
    r"""Reads an aggregator's choice; nothing readable is candidate 1, as a fallback.

    Compact: the reply is one in-range digit. Natural: the last in-range `\boxed{}`, which is the format, else
    the last in-range standalone digit.
    """
    text = visible_text(reply)
    if style == "compact":
        position = "123456789".find(text.strip()) if len(text.strip()) == 1 else -1
        readable = 0 <= position < num_candidates
        return Choice(position if readable else 0, in_format=readable, fallback=not readable)
    boxed = [int(box) for box in boxes(text) if box.isascii() and box.isdigit() and len(box) < 3]
    digits = [int(digit) for digit in _STANDALONE_DIGIT.findall(text)]
    for values, is_box in ((boxed, True), (digits, False)):
        in_range = [value for value in values if 1 <= value <= num_candidates]
        if in_range:
            return Choice(in_range[-1] - 1, in_format=is_box, fallback=False)
    return Choice(0, in_format=False, fallback=True)


def read_verdict(reply: str, *, style: Style) -> Judgement:
    r"""Reads an evaluator's verdict; unreadable is None, which a workflow takes as "keep refining".

    Compact: a leading `y`, or a leading `n` whose next digit is the feedback. Natural: the last box that says
    Correct or Incorrect, else a last line that is only that word; the feedback is the whole text.
    """
    if style == "compact":
        text = reply.strip()
        in_format = re.fullmatch(r"y|n[0-9]", text) is not None
        if text[:1] == "y":
            return Judgement(correct=True, feedback=text, in_format=in_format)
        if text[:1] == "n":
            digit = text[1:2] if text[1:2].isascii() and text[1:2].isdigit() else "0"
            return Judgement(correct=False, feedback=digit, in_format=in_format)
        return Judgement(correct=None, feedback=text, in_format=False)
    text = visible_text(reply)
    boxed = [word for word in map(_verdict_word, boxes(text)) if word is not None]
    if boxed:
        return Judgement(correct=boxed[-1], feedback=text, in_format=True)
    lines = [line for line in text.splitlines() if line.strip()]
    return Judgement(correct=_verdict_word(lines[-1]) if lines else None, feedback=text, in_format=False)


def read_strategies(reply: str, *, max_strategies: int, style: Style) -> Strategies:
    """Reads an orchestrator's strategies and cuts them to the number of workers.

    Compact: the letters L and R. Natural: numbered STRATEGY lines sorted by number, else a numbered list,
    else (fallback) lines of more than 10 characters. Else (fallback) the whole text.
    In format is exactly one letter a worker (compact) or 1 to `max_strategies` STRATEGY lines (natural).
    """
    text = visible_text(reply).strip()
    if style == "compact":
        letters = tuple(letter for letter in text if letter in STRATEGY_LETTERS)
        in_format = len(text) == len(letters) == max_strategies
        return Strategies(letters[:max_strategies] or (text,), in_format, fallback=not letters)
    named = sorted(
        ((_number(n), s.strip("* ")) for n, s in _STRATEGY_LINE.findall(text)), key=lambda pair: pair[0]
    )
    listed = named or [(_number(n), s.strip()) for n, s in _NUMBERED_LINE.findall(text)]
    if listed:
        in_format = bool(named) and len(named) <= max_strategies
        return Strategies(tuple(s for _, s in listed)[:max_strategies], in_format, fallback=False)
    lines = tuple(line.strip() for line in text.splitlines() if len(line.strip()) > _MIN_LINE)
    return Strategies(lines[:max_strategies] or (text,), in_format=False, fallback=True)


def is_copy(reply: str, sources: Iterable[str]) -> bool:
    """Returns whether a reply is one of the sources up to spacing, or holds a long one whole."""
    flat = " ".join(reply.split())
    flat_sources = (" ".join(source.split()) for source in sources)
    return any(
        source and (flat == source or (len(source) >= _MIN_CONTAINED and source in flat))
        for source in flat_sources
    )


def _verdict_word(text: str) -> bool | None:
    word = _TEXT_COMMAND.sub(r"\1", text).strip().strip("*_`$ ")
    word = _VERDICT_LABEL.sub("", word).strip("*_`$.!: ").casefold()
    return {"correct": True, "incorrect": False}.get(word)


def _number(digits: str) -> int:
    return int(digits[:6])
