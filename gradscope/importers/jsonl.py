"""Flat JSON Lines, one object a step, as gradscope's own `metrics.jsonl`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gradscope.importers.columns import rows_of
from gradscope.importers.json_lines import first_object, read_objects, with_numbers
from gradscope.importers.log import ForeignLog, Settings, existing


class Importer:
    """Flat JSON Lines with a step in each, such as gradscope's metrics.jsonl."""

    def recognises(self, source: str) -> bool:
        """Returns whether the first line is a flat object."""
        path = Path(source)
        return path.is_file() and bool(first_object(path))

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the lines.

        Raises:
            DataError: They hold no step, or the file is absent or empty.
        """
        path = existing(source, "a file of JSON Lines")
        objects, torn = read_objects(path)
        objects, spelled = with_numbers(objects)
        log = rows_of(objects, source=str(path), settings=settings)
        return replace(log, notes=(*torn, *spelled), is_table=False)  # lines are appended in order of time
