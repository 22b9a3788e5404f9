"""The order of a log's rows in time, which a table may have lost by being sorted or shuffled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from gradscope.errors import DataError
from gradscope.importers.log import Row
from gradscope.importers.segments import Reader, training_keys

FEW_TURNS = 3
"""A table whose steps go back more often, with fewer than two rows between, is in no order at all."""


def in_order(rows: Sequence[Row], read: Reader, source: str) -> tuple[Sequence[Row], tuple[str, ...]]:
    """Returns a table's rows as they were written, as far as that can be told, and what to say of it.

    Rows stand by time where all have one. Otherwise, where steps go back without repeating any, nothing was
    replaced, so the table was sorted or shuffled, and the rows stand by step.

    Raises:
        DataError: Steps repeat and go back after almost every row: which of the rows counts is open.
    """
    if _num_turns(rows, read) == 0:
        return rows, ()
    if all(math.isfinite(row.wall_time) for row in rows):
        by_time = sorted(rows, key=lambda row: row.wall_time)
        moved = by_time != list(rows)
        return by_time, ("The rows were not in order of time; they are sorted by it.",) if moved else ()
    if not _repeats(rows, read):
        note = "Steps go back though none stands twice, so the table is in no order of time: sorted by step."
        return sorted(rows, key=lambda row: row.counter), (note,)
    turns = _num_turns(rows, read)
    if turns > max(FEW_TURNS, len(rows) / 2 - 1):
        raise DataError(
            f"{source}: steps go back {turns} times in {len(rows)} rows and repeat, so the rows are in no "
            "order of time. Sort them as they were written, or choose one run's with --where COLUMN=VALUE."
        )
    return rows, ()


def _num_turns(rows: Sequence[Row], read: Reader) -> int:
    """Returns how often a row of training is at an earlier step than the one before."""
    steps = [row.counter for row in rows if training_keys(row, read)]
    return sum(after < before for before, after in pairwise(steps))


def _repeats(rows: Sequence[Row], read: Reader) -> bool:
    """Returns whether a key of training has two numbers at one step."""
    seen: set[tuple[str, float]] = set()
    for row in rows:
        own = {(key, row.counter) for key in training_keys(row, read)}
        if own & seen:
            return True
        seen |= own
    return False
