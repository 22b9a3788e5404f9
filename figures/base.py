"""What a figure hands back, and how it goes to disk: PDF, PNG and the plotted numbers as CSV."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from gradscope.errors import DataError, RunFileError
from gradscope.figures.style import paper_style

DOTS_PER_INCH = 300
NOTEBOOK_DOTS_PER_INCH = 150


class NothingToDrawError(DataError):
    """The runs hold nothing that this figure shows; the text says what is missing."""


class Drawing(NamedTuple):
    """A figure in final paper size and the numbers in it.

    Attributes:
        figure: Belongs to no window and to no pyplot state.
        table: One row a drawn number, in the order of drawing.
    """

    figure: Figure
    table: pd.DataFrame

    def save(self, folder: str | Path, name: str) -> list[Path]:
        """Writes NAME.pdf, NAME.png (300 dpi) and NAME.csv into `folder`, replacing what stands there.

        The bytes depend on the drawing alone: no dates, no program names. All three are made before the first
        is written.

        Raises:
            RunFileError: The folder cannot be made or written to.
        """
        contents = {".pdf": self._picture("pdf"), ".png": self._picture("png"), ".csv": self.csv().encode()}
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
            return [_replace(target / f"{name}{ending}", data) for ending, data in contents.items()]
        except OSError as error:
            raise RunFileError(
                f"{target}: the figure cannot be written ({error.strerror}). Name a folder you may write to."
            ) from error

    def csv(self) -> str:
        """Returns the table as CSV with ten significant digits; missing numbers are empty."""
        return self.table.to_csv(index=False, float_format="%.10g", lineterminator="\n")

    def _repr_png_(self) -> bytes:
        return self._picture("png", dots_per_inch=NOTEBOOK_DOTS_PER_INCH)

    def _picture(self, kind: str, *, dots_per_inch: int = DOTS_PER_INCH) -> bytes:
        fixed = {"pdf": {"CreationDate": None, "Producer": None, "Creator": None}, "png": {"Software": None}}
        buffer = io.BytesIO()
        with paper_style():
            self.figure.savefig(buffer, format=kind, dpi=dots_per_inch, metadata=fixed[kind])
        return buffer.getvalue()


def stack(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Returns the tables below one another; a column that one lacks is empty in its rows."""
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _replace(path: Path, data: bytes) -> Path:
    """Writes a file whole: a reader sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(data)
    os.replace(draft, path)
    return path
