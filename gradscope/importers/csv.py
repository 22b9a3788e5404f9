"""CSV files of any tool, one row a step; W&B's and TensorBoard's exports too."""

from __future__ import annotations

import csv
from pathlib import Path

from gradscope.errors import DataError
from gradscope.importers.columns import rows_of
from gradscope.importers.log import ForeignLog, Settings, existing


class Importer:
    """CSV of any tool, one row a step (with --mapping where the columns have names of their own)."""

    def recognises(self, source: str) -> bool:
        """Returns whether it is a file called `.csv` or `.tsv`."""
        return Path(source).suffix.lower() in {".csv", ".tsv"} and Path(source).is_file()

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the rows; empty cells are absent, numbers are floats.

        Raises:
            DataError: It is absent, empty, no CSV, or without steps.
        """
        path = existing(source, "a CSV file")
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(
                    file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True
                )
                table = [
                    {name: _cell(text) for name, text in row.items() if name is not None and text}
                    for row in reader
                ]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path}: cannot be read as CSV ({error}).") from error
        if not table:
            raise DataError(f"{path}: empty, there is nothing to import.")
        return rows_of(table, source=str(path), settings=settings)


def _cell(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
