"""Evaluations of an imported log: counts, or fractions that become counts where the number is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradscope.errors import ConfigError, DataError, unknown_name
from gradscope.importers.long_table import Entry, of_row
from gradscope.importers.segments import Reader, Segment
from gradscope.importers.wording import listed

DATASET = "evaluation"
"""What a data set is called that the source does not name."""
ROUNDING = 0.1
"""How far a fraction times the number of answers may be from a whole number; logs round to four digits."""

Totals = int | Mapping[str, int] | None
"""Problems of every evaluation, or of each data set; None where nobody told it."""


@dataclass
class Score:
    """One evaluation; `greedy` is None where the log does not say how replies were sampled."""

    step: int
    dataset: str
    greedy: bool | None
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


def totals_of(num_total: Totals, keys: Iterable[str], read: Reader, source: str) -> Mapping[str, int]:
    """Returns data set to the number of its problems, as far as told.

    Args:
        num_total: As the user gave it.
        keys: Keys of the log.
        read: Key to meaning.
        source: Where it is from, for messages.

    Raises:
        ConfigError: One number is given for several data sets.
        UnknownNameError: A data set is named that the log does not have.
    """
    meanings = [read(key) for key in keys]
    counts = {meaning.labels.get("dataset", DATASET) for meaning in meanings if meaning.metric == "num_total"}
    names = [
        meaning.labels.get("dataset", DATASET)
        for meaning in meanings
        if meaning.metric in ("eval_accuracy", "num_correct")
    ]
    datasets = [name for name in dict.fromkeys(names) if name not in counts]
    if num_total is None:
        return {}
    if isinstance(num_total, Mapping):
        for name in num_total:
            if name not in names:
                raise unknown_name("data set", name, dict.fromkeys(names), where=f"{source}, --num-total")
        return num_total
    if len(datasets) > 1:
        raise ConfigError(
            f"--num-total is one number, but {source} holds {len(datasets)} data sets ({listed(datasets)}). "
            f"Say whose it is: --num-total {datasets[0]}={num_total}."
        )
    return dict.fromkeys(datasets, num_total)


def scores_of(segment: Segment, read: Reader, *, totals: Mapping[str, int], source: str) -> Scores:
    """Returns a segment's evaluations in the order of the log.

    Args:
        segment: With the rows that hold evaluations.
        read: Key to meaning.
        totals: Data set to the problems of its evaluations, where they are logged without their number.
        source: Where it is from, for messages.

    Raises:
        DataError: A fraction is none of that number, or counts cannot be.
    """
    counted: list[Score] = []
    fractions: dict[str, None] = {}
    for row in segment.evaluations:
        entries = (entry for entry in of_row(0, row, read) if entry.meaning.is_evaluation)
        found = [entry for entry in entries if not math.isnan(entry.value)]
        for (dataset, sampling), own in _by_setting(found).items():
            score = Score(int(row.counter), dataset, {"greedy": True, "sampled": False}.get(sampling))
            has_counts = any(entry.metric == "num_correct" for entry in own)
            # Of several fractions the one of most answers counts, as mean@8 beside mean@1.
            for entry in sorted(own, key=_repeats):
                if has_counts and entry.metric == "eval_accuracy":
                    continue
                if entry.metric != "eval_accuracy":
                    _put(score, entry)
                elif dataset not in totals:
                    fractions[entry.source_key] = None
                else:
                    _count(score, entry, totals[dataset], source)
            if not math.isnan(score.num_correct):
                if math.isnan(score.num_total):
                    score.num_total = float(totals.get(dataset, math.nan))
                counted.append(_checked(score, source))
    return Scores(counted, tuple(fractions))


def _by_setting(entries: Iterable[Entry]) -> Mapping[tuple[str, str], Sequence[Entry]]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        labels = entry.meaning.labels
        groups.setdefault((labels.get("dataset", DATASET), labels.get("sampling", "")), []).append(entry)
    return groups


def _repeats(entry: Entry) -> int:
    """Returns how often each problem was answered for a key's value."""
    return int(entry.meaning.labels.get("repeats", 1))


def _put(score: Score, entry: Entry) -> None:
    if entry.role:
        getattr(score, entry.metric)[entry.role] = entry.value
    else:
        setattr(score, entry.metric, entry.value)


def _count(score: Score, entry: Entry, num_problems: int, source: str) -> None:
    """Turns a fraction into counts of answers: each problem answered as often as the key says."""
    num_answers = num_problems * _repeats(entry)
    right = entry.value * num_answers
    if not 0 <= entry.value <= 1 or abs(right - round(right)) > ROUNDING:
        raise DataError(
            f"{source}: {entry.source_key} is {entry.value:g} at step {entry.step}, which is none of "
            f"{num_answers} answers. Give the right number of problems with --num-total."
        )
    score.num_correct, score.num_total = float(round(right)), float(num_answers)


def _checked(score: Score, source: str) -> Score:
    """Returns a score whose counts can be; a temperature says whether replies were sampled.

    Raises:
        DataError: The counts cannot be.
    """
    if math.isnan(score.num_total):
        raise DataError(
            f"{source}: {score.num_correct:g} right at step {score.step}, but not of how many. Say it with "
            "--num-total."
        )
    if not 0 <= score.num_correct <= score.num_total:
        raise DataError(
            f"{source}: {score.num_correct:g} right of {score.num_total:g} at step {score.step} cannot be."
        )
    if score.num_correct % 1 or score.num_total % 1:
        raise DataError(
            f"{source}: {score.num_correct:g} right of {score.num_total:g} at step {score.step} are no whole "
            "numbers. Is it an accuracy?"
        )
    if score.greedy is None and not math.isnan(score.temperature):
        score.greedy = score.temperature == 0
    return score
