"""`gradscope repair`: saves what can be saved of a damaged run or HDF5 file into a new file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def repair(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run directory, run file or any HDF5 file.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The new file; by default NAME.repaired.h5 beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write what can be saved of FILE into a new file and say what is lost; FILE stays as it is."""
    from gradscope.runfile.repair import repair as save

    done = save(file, out)
    if as_json:
        typer.echo(json.dumps({**asdict(done), "target": str(done.target)}))
        return
    typer.echo(f"{done.target}: {'a run' if done.is_run else 'an HDF5 file, not of gradscope'}")
    typer.echo("Saved")
    for sentence in done.saved:
        typer.echo(f"  {sentence}")
    typer.echo("Lost" if done.lost else "Lost: nothing")
    for sentence in done.lost:
        typer.echo(f"  {sentence}")
