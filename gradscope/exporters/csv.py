"""CSV: one row a step, one column a scalar; the whole file is replaced when it is written."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from gradscope.exporters.rows import Rows
from gradscope.exporters.sink import Target
from gradscope.runfile.durable import write_atomically


class Exporter:
    """CSV, one row a step: every scalar and inner product, numbers in full."""

    package: ClassVar[str] = ""
    holds_about: ClassVar[bool] = False
    holds_products: ClassVar[bool] = True
    default_path: ClassVar[str] = "metrics.csv"

    def __init__(self, target: Target) -> None:
        self.run_id = ""
        self._path = target.path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        there = _read(target) if target.from_step is not None and self._path.exists() else []
        self._rows = Rows(there, keep_to_step=target.from_step)

    def log(self, step: int, values: Mapping[str, float], *, wall_time: float = math.nan) -> None:
        """Takes scalars of one step."""
        self._rows.add(step, values, wall_time)

    def flush(self) -> None:
        """Writes the file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._rows.names(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows.rows)
        write_atomically(self._path, text.getvalue())

    def close(self) -> None:
        """Writes the file."""
        self.flush()


def _read(target: Target) -> list[dict[str, Any]]:
    with target.path.open(encoding="utf-8", newline="") as file:
        table = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    return [{**row, "step": int(row["step"])} for row in table]
