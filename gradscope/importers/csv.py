"""CSV files of any tool, one row a step; W&B's and TensorBoard's exports too."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

from gradscope.errors import DataError
from gradscope.importers.columns import STEPS, rows_of
from gradscope.importers.log import ForeignLog, Settings, existing
from gradscope.importers.panels import without_run_names
from gradscope.importers.wording import listed

SEPARATORS = (",", ";", "\t")
TORN = (
    "The last line has no end, as if a crash had torn it, and is left out; add a line break if it is whole."
)
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")
UNNAMED = "unnamed"
"""What a column without a name is called, as that of row numbers."""


class Importer:
    """CSV of any tool, one row a step (with --mapping where the columns have names of their own)."""

    def recognises(self, source: str) -> bool:
        """Returns whether it is a file called `.csv` or `.tsv`."""
        return Path(source).suffix.lower() in {".csv", ".tsv"} and Path(source).is_file()

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the rows; empty cells are absent, numbers are floats.

        Raises:
            DataError: It is absent, empty, no CSV, has two columns of one name, or is without steps.
        """
        path = existing(source, "a CSV file")
        try:
            text = path.read_bytes().decode("utf-8-sig")
            separator = _separator(text, path)
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
            header, *lines = list(reader) or [[]]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path}: cannot be read as CSV ({error}).") from error
        names = _names(header, path)
        is_torn = bool(lines) and not text.endswith(("\n", "\r"))
        table = [
            {name: _cell(cell, separator) for name, cell in zip(names, line, strict=False) if cell}
            for line in (lines[:-1] if is_torn else lines)
            if line
        ]
        if not table:
            raise DataError(f"{path}: empty, there is nothing to import.{f' {TORN}' if is_torn else ''}")
        table, names, told = without_run_names(table, names, STEPS, source=str(path))
        log = rows_of(table, source=str(path), settings=settings, columns=names)
        return replace(log, notes=(*([TORN] if is_torn else []), *told))


def _separator(text: str, path: Path) -> str:
    """Returns what separates the header's columns: that which stands there most often."""
    header = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    if path.suffix.lower() == ".tsv":
        return "\t"
    return max(SEPARATORS, key=header.count)


def _names(header: list[str], path: Path) -> list[str]:
    names = [name or UNNAMED for name in header]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: several columns are called {listed(twice)}. Give each a name of its own.")
    return names


def _cell(text: str, separator: str) -> float | str:
    if separator == ";" and DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return text
