"""Evaluations of an imported log: counts, or fractions that become counts where the number is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradscope.errors import DataError
from gradscope.importers.long_table import Entry, of_row
from gradscope.importers.segments import Reader, Segment

DATASET = "evaluation"
"""What a data set is called that the source does not name."""
ROUNDING = 0.1
"""How far a fraction times the number of answers may be from a whole number; logs round to four digits."""


@dataclass
class Score:
    """One evaluation."""

    step: int
    dataset: str
    greedy: bool
    num_correct: float = math.nan
    num_total: float = math.nan
    temperature: float = math.nan
    role_accuracy: dict[str, float] = field(default_factory=dict)
    role_tokens_mean: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """The evaluations of one segment.

    Attributes:
        counted: Those with counts.
        fractions: Keys that hold fractions of unknown numbers of answers.
    """

    counted: list[Score]
    fractions: tuple[str, ...]


def scores_of(segment: Segment, read: Reader, *, num_total: int | None, source: str) -> Scores:
    """Returns a segment's evaluations in the order of the log.

    Args:
        segment: With the rows that hold evaluations.
        read: Key to meaning.
        num_total: Problems of every evaluation that is logged without their number.
        source: Where it is from, for messages.

    Raises:
        DataError: A fraction is none of that number, or counts cannot be.
    """
    counted: list[Score] = []
    fractions: dict[str, None] = {}
    for row in segment.evaluations:
        found = [entry for entry in of_row(0, row, read) if entry.meaning.is_evaluation]
        for (dataset, sampling), own in _by_setting(found).items():
            score = Score(int(row.counter), dataset, sampling == "greedy")
            has_counts = any(entry.metric == "num_correct" for entry in own)
            for entry in own:
                if has_counts and entry.metric == "eval_accuracy":
                    continue
                if entry.metric != "eval_accuracy":
                    _put(score, entry)
                elif num_total is None:
                    fractions[entry.source_key] = None
                else:
                    _count(score, entry, num_total, source)
            if not math.isnan(score.num_correct):
                if num_total is not None and math.isnan(score.num_total):
                    score.num_total = float(num_total)
                counted.append(_checked(score, source))
    return Scores(counted, tuple(fractions))


def _by_setting(entries: Iterable[Entry]) -> Mapping[tuple[str, str], Sequence[Entry]]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        labels = entry.meaning.labels
        groups.setdefault((labels.get("dataset", DATASET), labels.get("sampling", "")), []).append(entry)
    return groups


def _put(score: Score, entry: Entry) -> None:
    if entry.role:
        getattr(score, entry.metric)[entry.role] = entry.value
    else:
        setattr(score, entry.metric, entry.value)


def _count(score: Score, entry: Entry, num_problems: int, source: str) -> None:
    """Turns a fraction into counts of answers: each problem answered as often as the key says."""
    num_answers = num_problems * int(entry.meaning.labels.get("repeats", 1))
    right = entry.value * num_answers
    if abs(right - round(right)) > ROUNDING or not 0 <= entry.value <= 1:
        raise DataError(
            f"{source}: {entry.source_key} is {entry.value:g} at step {entry.step}, which is none of "
            f"{num_answers} answers. Give the right number of problems with --num-total."
        )
    score.num_correct, score.num_total = float(round(right)), float(num_answers)


def _checked(score: Score, source: str) -> Score:
    if math.isnan(score.num_total):
        raise DataError(
            f"{source}: {score.num_correct:g} right at step {score.step}, but not of how many. Say it with "
            "--num-total."
        )
    if not 0 <= score.num_correct <= score.num_total:
        raise DataError(
            f"{source}: {score.num_correct:g} right of {score.num_total:g} at step {score.step} cannot be."
        )
    return score
