"""Parquet files of any tool, one row a step; W&B's history artifact too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gradscope.errors import DataError
from gradscope.exporters.parquet import METADATA
from gradscope.importers.columns import rows_of
from gradscope.importers.log import ForeignLog, Settings, existing
from gradscope.importers.wording import listed


class Importer:
    """Parquet of any tool, one row a step, such as W&B's history artifact (a file or a folder of them)."""

    def recognises(self, source: str) -> bool:
        """Returns whether it is a file called `.parquet`, or a folder that holds some."""
        path = Path(source)
        return (path.is_file() and path.suffix in {".parquet", ".pq"}) or (
            path.is_dir() and bool(_files(path))
        )

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the rows; nulls are absent.

        Raises:
            DataError: It is absent, empty, no parquet, or without steps.
        """
        import pyarrow
        import pyarrow.parquet

        path = existing(source, "a parquet file")
        files = _files(path) if path.is_dir() else [path]
        try:
            tables = [pyarrow.parquet.read_table(file) for file in files]
        except (OSError, pyarrow.ArrowException) as error:
            reason = " ".join(str(error).split())[:120]
            raise DataError(f"{path}: cannot be read as parquet ({reason}).") from error
        names = list(dict.fromkeys(name for own in tables for name in own.column_names))
        twice = [name for name in names if any(own.column_names.count(name) > 1 for own in tables)]
        if twice:
            raise DataError(
                f"{path}: several columns are called {listed(twice)}. Give each a name of its own."
            )
        table = [row for own in tables for row in own.to_pylist()]
        if not table:
            raise DataError(f"{path}: empty, there is nothing to import.")
        log = rows_of(table, source=str(path), settings=settings, columns=names)
        about = json.loads((tables[0].schema.metadata or {}).get(METADATA, b"{}"))
        return replace(log, about=about)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))
