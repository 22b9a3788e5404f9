"""Steps of a log's rows, and the stretches between resumes: where steps go back, a new one begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gradscope.errors import DataError
from gradscope.importers.columns import COUNTERS, STEPS, TIMES
from gradscope.importers.dialect import Meaning
from gradscope.importers.log import ForeignLog, Row
from gradscope.runfile.columns import number
from gradscope.runfile.writer import LARGEST_STEP

LOGGED_STEPS = tuple(name for name in STEPS if name not in COUNTERS)
MOST_SEGMENTS = 100
"""A log that goes back more often than this is not one of a run that was resumed."""

CLOCKS = (*TIMES, *COUNTERS, "_runtime", "_time", "epoch")
"""Keys that trackers put into every row; beside an evaluation they make no training step."""

Reader = Callable[[str], Meaning]


@dataclass
class Segment:
    """A stretch of a run between resumes.

    Attributes:
        steps: Step to its row; of rows at one step the later values count.
        evaluations: Rows with parts of evaluations, all of them, in order.
    """

    steps: dict[int, Row] = field(default_factory=dict)
    evaluations: list[Row] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        """Its first step."""
        return int(min(self.steps))


def with_steps(log: ForeignLog, source: str) -> tuple[list[Row], tuple[str, ...]]:
    """Returns the rows with the training step as their counter, and what to say about it.

    Where the source's own counter only counts rows, the logged key is preferred; rows without it are left
    out. Without such a key the counter is taken, which the note says.

    Raises:
        DataError: No row has a step, or a step is no whole number or too large.
    """
    rows, notes = list(log.rows), []
    keys = {key for row in rows for key in row.values}
    axis = None if log.counter_is_step else next((key for key in LOGGED_STEPS if key in keys), None)
    if axis is not None:
        rows = [replace(row, counter=_step(row, axis), values=_without(row, axis)) for row in rows]
    elif not log.counter_is_step:
        notes.append(
            "No key holds the training step, so the source's own row counter is taken for it: steps are then "
            "numbers of log calls."
        )
    known = [row for row in rows if math.isfinite(row.counter)]
    if len(known) < len(rows):
        notes.append(f"{len(rows) - len(known)} of {len(rows)} rows have no step and are left out.")
    if not known:
        raise DataError(f"{source}: no row has a step. Name the key that holds it with --step.")
    broken = next((row.counter for row in known if row.counter % 1), None)
    if broken is not None:
        raise DataError(f"{source}: step {broken:g} is no whole number. Name the right key with --step.")
    largest = max(known, key=lambda row: abs(row.counter)).counter
    if abs(largest) > LARGEST_STEP:
        raise DataError(
            f"{source}: step {largest:g} is beyond {LARGEST_STEP}. Name the right key with --step."
        )
    return known, tuple(notes)


def _step(row: Row, axis: str) -> float:
    found = number(row.values.get(axis))
    return math.nan if found is None else found


def _without(row: Row, axis: str) -> dict[str, object]:
    return {key: value for key, value in row.values.items() if key != axis}


def split(rows: Sequence[Row], read: Reader, source: str) -> list[Segment]:
    """Returns the segments of a run, each with its rows by step.

    A segment begins where a key of training is logged at an earlier step than before. Evaluations may come
    in any order and begin none.

    Raises:
        DataError: Steps go back so often that they are no resumes.
    """
    turns = set(turning_points(rows, read))
    if len(turns) >= MOST_SEGMENTS:
        raise DataError(
            f"{source}: steps go back more than {MOST_SEGMENTS} times: several runs in one source, "
            "or not the column of steps. See --where and --step."
        )
    segments = [Segment()]
    for place, row in enumerate(rows):
        if place in turns:
            segments.append(Segment())
        _add(segments[-1], row, training_keys(row, read), read)
    return segments


def turning_points(rows: Sequence[Row], read: Reader) -> list[int]:
    """Returns the positions of rows at which a key of training stands at an earlier step than before."""
    turns: list[int] = []
    last: dict[str, float] = {}
    for place, row in enumerate(rows):
        numbers = training_keys(row, read)
        if any(row.counter < last.get(key, -math.inf) for key in numbers):
            turns.append(place)
            last = {}
        last |= dict.fromkeys(numbers, row.counter)
    return turns


def training_keys(row: Row, read: Reader) -> list[str]:
    """Returns the keys of a row with numbers of a training step; none where it only holds an evaluation."""
    keys = [key for key, value in row.values.items() if number(value) is not None]
    own = [key for key in keys if not read(key).is_evaluation]
    is_step = len(own) == len(keys) or any(key not in CLOCKS for key in own)
    return own if is_step else []


def _add(segment: Segment, row: Row, numbers: Sequence[str], read: Reader) -> None:
    step = int(row.counter)
    if numbers:
        before = segment.steps.get(step)
        own = {key: row.values[key] for key in numbers}
        values = {**(before.values if before else {}), **own}
        segment.steps[step] = Row(row.counter, values, row.wall_time)
    if any(read(key).is_evaluation for key in row.values):
        segment.evaluations.append(row)
