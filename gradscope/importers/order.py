"""The order of a log's rows in time, which a table may have lost by being sorted or shuffled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradscope.errors import DataError
from gradscope.importers.log import Row
from gradscope.importers.segments import Reader, training_keys, turning_points

FEW_TURNS = 3
"""Rows whose steps go back more often, after fewer than two rows each time, are in no order at all."""


def in_order(
    rows: Sequence[Row], read: Reader, source: str, *, is_table: bool
) -> tuple[Sequence[Row], tuple[str, ...]]:
    """Returns rows in the order in which they were written, as far as that can be told, and a note of it.

    A log has that order. The rows of a table stand by time where all have one. Otherwise, where steps go back
    without repeating any, nothing was replaced, so the table was sorted or shuffled: they stand by step.

    Raises:
        DataError: Steps go back after almost every row: which of several rows of a step counts is open.
    """
    turns = len(turning_points(rows, read))
    if turns == 0:
        return rows, ()
    if is_table and all(math.isfinite(row.wall_time) for row in rows):
        by_time = sorted(rows, key=lambda row: row.wall_time)
        moved = by_time != list(rows)
        return by_time, ("The rows were not in order of time; they are sorted by it.",) if moved else ()
    if is_table and not _repeats(rows, read):
        note = "Steps go back though none stands twice, so the table is in no order of time: sorted by step."
        return sorted(rows, key=lambda row: row.counter), (note,)
    if turns > max(FEW_TURNS, len(rows) / 2 - 1):
        raise DataError(
            f"{source}: steps go back {turns} times in {len(rows)} rows, so these are in no order of time. "
            "Sort them as they were written, or choose one run's with --where COLUMN=VALUE."
        )
    return rows, ()


def _repeats(rows: Sequence[Row], read: Reader) -> bool:
    """Returns whether a key of training has two numbers at one step."""
    seen: set[tuple[str, float]] = set()
    for row in rows:
        own = {(key, row.counter) for key in training_keys(row, read)}
        if own & seen:
            return True
        seen |= own
    return False
