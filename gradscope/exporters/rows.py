"""Tables that are held in memory and written whole: what CSV and parquet have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TIME = "train/wall_time"


class Rows:
    """Rows by step, each with the names that it has.

    Args:
        rows: Those that are there already.
        keep_to_step: Rows of later steps are dropped; None keeps all.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]] = (), *, keep_to_step: int | None = None) -> None:
        kept = (row for row in rows if keep_to_step is None or float(row["step"]) <= keep_to_step)
        self.rows: list[dict[str, Any]] = [dict(row) for row in kept]

    def add(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """Adds values to the last row where it is of that step and has none of them, else a row."""
        last = self.rows[-1] if self.rows else {}
        if last.get("step") == step and not set(values) & set(last):
            last.update(values)
        else:
            # The time of an evaluation is none of a training step's.
            is_step = any(not name.startswith("eval/") for name in values)
            time = {TIME: wall_time} if is_step and not math.isnan(wall_time) else {}
            self.rows.append({"step": step, **time, **values})

    def names(self) -> list[str]:
        """Returns the columns: step, then the others in the order in which they came."""
        return list(dict.fromkeys(["step", *(name for row in self.rows for name in row)]))
