"""trackio's SQLite file: one a project, with all its runs."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.json_lines import NOT_JSON
from gradscope.importers.log import (
    ForeignLog,
    Row,
    Settings,
    existing,
    no_rows,
    refuse_mixture,
    refuse_options,
)
from gradscope.importers.wording import listed

NAMES = ("run_name", "run_id")
NEEDED = ("step", "metrics")
HEADER = b"SQLite format 3"
NOTE = "trackio's own step only numbers rows from 0: the training step is taken from a logged key, if any."


class Importer:
    """trackio's SQLite file of a project, or the folder with it (choose a run with --where run_name=NAME)."""

    def recognises(self, source: str) -> bool:
        """Returns whether it is a SQLite file, or a folder with some called `.db`, as TRACKIO_DIR is."""
        path = Path(source)
        return _is_database(path) or bool(_databases(path))

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the rows of one run.

        Raises:
            DataError: It is absent, no project of trackio's, empty, or of several projects or runs.
        """
        path = _project(existing(source, "trackio's SQLite file (PROJECT.db) or the folder with it"))
        refuse_options(source, "trackio's SQLite file", settings, "step")
        table = [row for row in _table(path) if settings.matches(row)]
        if not table:
            raise no_rows(str(path), settings)
        names = [name for name in NAMES if name in table[0]]
        refuse_mixture(str(path), {name: {str(row[name]) for row in table} for name in names[:1]}, settings)
        rows = tuple(
            Row(float(row["step"]), _metrics(path, row["metrics"]), _seconds(row.get("timestamp")))
            for row in table
        )
        return ForeignLog(rows, counter_is_step=False, notes=(NOTE,), about=_about(path, table[0]))


def _project(path: Path) -> Path:
    """Returns the file of the one project in a folder; a file as it is."""
    if not path.is_dir():
        return path
    found = _databases(path)
    if not found:
        raise DataError(f"{path}: holds no SQLite file of a trackio project (PROJECT.db).")
    if len(found) > 1:
        names = listed(file.name for file in found)
        raise DataError(f"{path}: holds {len(found)} projects of trackio's ({names}). Name one of the files.")
    return found[0]


def _databases(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*.db")) if _is_database(file)] if folder.is_dir() else []


def _is_database(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER


def _table(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of the table `metrics` in the order of writing, whatever further columns it has."""
    rows = _select(path, "SELECT * FROM metrics ORDER BY rowid")
    if rows and not all(name in rows[0] for name in NEEDED):
        raise DataError(
            f"{path}: the table 'metrics' has columns {', '.join(rows[0])}, expected {', '.join(NEEDED)}. "
            "Is it trackio's?"
        )
    return rows


def _select(path: Path, query: str, parameters: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(query, parameters)]
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise DataError(f"{path}: cannot be read as trackio's SQLite file ({error}).") from error


def _metrics(path: Path, content: Any) -> dict[str, Any]:
    """Returns a row's values; trackio stores JSON, as text or bytes."""
    try:
        values = json.loads(content)
    except (TypeError, *NOT_JSON) as error:
        raise DataError(f"{path}: a row's metrics are not JSON ({error}).") from error
    return values if isinstance(values, dict) else {}


def _about(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run's configuration, in which our own export says slots and policies."""
    name = next(name for name in reversed(NAMES) if name in row)
    found = _select(path, "SELECT name FROM sqlite_master WHERE name = 'configs'")
    configs = found and _select(path, f"SELECT config FROM configs WHERE {name} = ?", (row[name],))
    return _metrics(path, configs[0]["config"]) if configs else {}


def _seconds(timestamp: Any) -> float:
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return math.nan
