"""Tables with a column of steps: what CSV, parquet and flat JSON Lines have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.log import ForeignLog, Row, Settings, no_rows, refuse_mixture, shown
from gradscope.importers.wording import listed
from gradscope.runfile.columns import number

STEPS = ("step", "train/global_step", "training/global_step", "trainer/global_step", "global_step", "Step",
         "checkpoint_step", "_step")  # fmt: skip
"""Names under which steps are looked for, W&B's counter of rows last."""
COUNTERS = ("_step",)
TIMES = ("_timestamp", "timestamp", "wall_time", "Wall time", "train/wall_time")
RUNS = ("run_name", "run_id", "run", "Name")
"""Columns that tell runs apart in one table."""
NO_COLUMNS = "no columns"
SEEDS = ("seed", "random_seed", "trial", "experiment", "experiment_name")
"""Columns that tell runs apart where one step stands under several of their values."""


def rows_of(
    table: Sequence[Mapping[str, Any]], *, source: str, settings: Settings, columns: Sequence[str] = ()
) -> ForeignLog:
    """Returns a table's rows, each with its step, without the column of steps.

    Args:
        table: One mapping a row.
        source: Where it is from, for messages.
        settings: The column of steps, and which rows to keep.
        columns: Its columns, where it may have some without any value.

    Raises:
        DataError: There is no column of steps, it holds no numbers, or the rows are of several runs.
    """
    names = list(dict.fromkeys([*columns, *(name for row in table for name in row)]))
    for column in settings.where:
        if column not in names:
            raise DataError(
                f"{source}: no column '{column}'. It has {listed(names, most=8, none=NO_COLUMNS)}."
            )
    chosen = [row for row in table if settings.matches(row)]
    if not chosen:
        raise no_rows(source, settings)
    column = _step_column(names, source, settings)
    refuse_mixture(source, _runs(chosen, column), settings)
    rows = []
    for row in chosen:
        step = _number(row.get(column))
        values = {name: value for name, value in row.items() if name != column and value is not None}
        rows.append(Row(step, values, next((_seconds(row[name]) for name in TIMES if name in row), math.nan)))
    if all(math.isnan(row.counter) for row in rows):
        raise DataError(
            f"{source}: column '{column}' holds no numbers. Name the column of steps with --step."
        )
    return ForeignLog(tuple(rows), column not in COUNTERS, is_table=True, columns=tuple(names))


def _runs(rows: Sequence[Mapping[str, Any]], step: str) -> dict[str, set[str]]:
    """Returns each column that tells runs apart, and its values."""
    named = {name: {shown(row[name]) for row in rows if row.get(name) is not None} for name in RUNS}
    for name in SEEDS:
        places: dict[Any, set[str]] = {}
        for row in rows:
            if row.get(name) is not None and isinstance(row[name], str | int | float):
                places.setdefault(row.get(step), set()).add(shown(row[name]))
        if any(len(values) > 1 for values in places.values()):
            named[name] = set().union(*places.values())
    return named


def _step_column(names: Sequence[str], source: str, settings: Settings) -> str:
    if settings.step is not None:
        if settings.step not in names:
            raise DataError(
                f"{source}: no column '{settings.step}'. It has {listed(names, most=8, none=NO_COLUMNS)}."
            )
        return settings.step
    found = next((name for name in STEPS if name in names), None)
    if found is None:
        raise DataError(
            f"{source}: no column of steps ({', '.join(STEPS)}). "
            f"It has {listed(names, most=8, none=NO_COLUMNS)}. Name it with --step."
        )
    return found


def _number(value: Any) -> float:
    """Returns a number, also one spelled as text; NaN for what is none."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return math.nan
    found = number(value)
    return math.nan if found is None else found


def _seconds(value: Any) -> float:
    found = _number(value)
    return found if found > 1e8 else math.nan  # W&B's `_runtime` and the like count from the start
