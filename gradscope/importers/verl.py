"""verl's file logger: JSON Lines of `{"step": ..., "data": {...}}`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.json_lines import first_object, read_objects, with_numbers
from gradscope.importers.log import ForeignLog, Row, Settings, existing, no_rows, refuse_options
from gradscope.importers.wording import listed


class Importer:
    """verl and its forks: the file logger's JSON Lines of step and data."""

    def recognises(self, source: str) -> bool:
        """Returns whether the first line has step and data."""
        path = Path(source)
        first = first_object(path) if path.is_file() else {}
        return isinstance(first.get("data"), dict) and "step" in first

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the lines.

        Raises:
            DataError: A line lacks step or data, or the file is absent or empty.
        """
        path = existing(source, "the JSON Lines of verl's file logger")
        refuse_options(source, "verl's file logger", settings, "step")
        objects, torn = read_objects(path)
        rows = [_row(path, number, line) for number, line in enumerate(objects, 1)]
        chosen = [row for row in rows if settings.matches(row.values)]
        if not chosen:
            raise no_rows(str(path), settings)
        values, spelled = with_numbers([dict(row.values) for row in chosen])
        return ForeignLog(
            tuple(Row(row.counter, own) for row, own in zip(chosen, values, strict=True)),
            notes=(*torn, *spelled),
        )


def _row(path: Path, number: int, line: dict[str, Any]) -> Row:
    step, data = line.get("step"), line.get("data")
    if isinstance(step, str) and step.strip().lstrip("+-").isdecimal():
        step = int(step)
    if not isinstance(step, int | float) or not math.isfinite(step) or not isinstance(data, dict):
        raise DataError(
            f'{path}, entry {number}: expected {{"step": number, "data": object}}, found keys '
            f"{listed(line, none='none')}. For flat lines use --format jsonl."
        )
    return Row(step, data)
