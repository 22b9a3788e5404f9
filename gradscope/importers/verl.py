"""verl's file logger: JSON Lines of `{"step": ..., "data": {...}}`."""

from __future__ import annotations

import math
from pathlib import Path

from gradscope.errors import DataError
from gradscope.importers.json_lines import first_object, read_objects, torn_note
from gradscope.importers.log import ForeignLog, Row, Settings, existing


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
        objects, num_torn = read_objects(path)
        rows = []
        for number, line in enumerate(objects, 1):
            step, data = line.get("step"), line.get("data")
            if not isinstance(step, int | float) or not math.isfinite(step) or not isinstance(data, dict):
                raise DataError(
                    f'{path}, entry {number}: expected {{"step": number, "data": object}}, found keys '
                    f"{', '.join(line) or 'none'}. For flat lines use --format jsonl."
                )
            if settings.matches(data):
                rows.append(Row(step, data))
        return ForeignLog(tuple(rows), notes=torn_note(num_torn))
