"""`gradscope export`: writes a run's numbers for another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run directory or run.h5.")],
    to: Annotated[str, typer.Option("--to", help="csv, parquet, tensorboard, wandb or trackio.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File (csv, parquet) or folder (tensorboard).")
    ] = None,
    project: Annotated[str, typer.Option("--project", help="Project at W&B or trackio.")] = "gradscope",
    name: Annotated[
        str | None, typer.Option("--name", help="What the run is called there; by default as its directory.")
    ] = None,
) -> None:
    """Write the scalars of RUN for another tool: a table, or a run of a tracker."""
    from gradscope.exporters.exporting import export_run

    made = export_run(run, to, out=out, project=project, name=name)
    typer.echo(f"{made.where}: {made.num_rows} rows of {made.num_names} scalars")
