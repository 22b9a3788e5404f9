"""Parquet: one row a step, one column a scalar; slots and policies stand in its metadata."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import ClassVar

from gradscope.exporters.rows import Rows
from gradscope.exporters.sink import Target

METADATA = b"gradscope"


class Exporter:
    """Parquet, one row a step: every scalar and inner product, slots and policies as metadata."""

    package: ClassVar[str] = "pyarrow"
    holds_about: ClassVar[bool] = True
    holds_products: ClassVar[bool] = True
    default_path: ClassVar[str] = "metrics.parquet"

    def __init__(self, target: Target) -> None:
        import pyarrow.parquet

        self.run_id = ""
        self._path, self._about = target.path, target.about
        self._path.parent.mkdir(parents=True, exist_ok=True)
        there = []
        if target.from_step is not None and self._path.exists():
            table = pyarrow.parquet.read_table(self._path).to_pylist()
            there = [{name: value for name, value in row.items() if value is not None} for row in table]
        self._rows = Rows(there, keep_to_step=target.from_step)

    def log(self, step: int, values: Mapping[str, float], *, wall_time: float = math.nan) -> None:
        """Takes scalars of one step."""
        self._rows.add(step, values, wall_time)

    def flush(self) -> None:
        """Writes the file beside its place and puts it there."""
        import pyarrow
        import pyarrow.parquet

        columns = {name: [row.get(name) for row in self._rows.rows] for name in self._rows.names()}
        types = {name: pyarrow.int64() if name == "step" else pyarrow.float64() for name in columns}
        table = pyarrow.table({name: pyarrow.array(own, types[name]) for name, own in columns.items()})
        about = json.dumps(dict(self._about), default=str).encode()
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        pyarrow.parquet.write_table(table.replace_schema_metadata({METADATA: about}), temporary)
        os.replace(temporary, self._path)

    def close(self) -> None:
        """Writes the file."""
        self.flush()
