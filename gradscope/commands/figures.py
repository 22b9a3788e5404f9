"""`gradscope figures`: the mechanism figures of one or several runs, with the numbers in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

MISSING_GLYPH = r"Glyph .* missing from (current )?font"
"""Matplotlib's warning of a letter that its font lacks, once for every letter; it draws a box."""


def figures(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run directories or run files; seeds of a cell are bands."),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder for the figures; those there are replaced.")
    ],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Draw this figure alone; may be given several times.")
    ] = None,
) -> None:
    """Draw the mechanism figures of RUNS as PDF, PNG and CSV into a folder.

    A figure that the runs hold no input for is skipped with the reason, unless --only asks for it.
    """
    from gradscope.figures import FIGURES
    from gradscope.figures.base import NothingToDrawError
    from gradscope.runfile import open_run

    chosen = {name: FIGURES.get(name) for name in only or FIGURES.names()}
    opened = [open_run(path) for path in runs]
    warnings.filterwarnings("ignore", MISSING_GLYPH, UserWarning)
    for name, draw in chosen.items():
        try:
            files = draw(opened).save(out, name.replace(":", "."))
        except NothingToDrawError as reason:
            if only:
                raise NothingToDrawError(f"figure '{name}' cannot be drawn: {reason}") from reason
            typer.echo(f"gradscope: figure '{name}' skipped: {reason}", err=True)
            continue
        typer.echo(f"{name}: {', '.join(str(file) for file in files)}")
