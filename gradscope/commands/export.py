"""`gradscope export`: writes a run's numbers for another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory or run.h5.")],
    to: Annotated[str, typer.Option("--to", help="Which tool; see 'gradscope list exporters'.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File or folder, for tools that read one.")
    ] = None,
    project: Annotated[
        str, typer.Option("--project", help="Project, for trackers that have them.")
    ] = "gradscope",
    name: Annotated[
        str | None, typer.Option("--name", help="What the run is called there; by default as its directory.")
    ] = None,
) -> None:
    """Write the scalars of RUN for another tool: a table, or a run of a tracker."""
    from gradscope.exporters.exporting import export_run

    made = export_run(run, to, out=out, project=project, name=name)
    typer.echo(f"{made.where}: {made.num_rows} rows of {made.num_names} scalars")
    for note in made.notes:
        typer.echo(f"  {note}")
