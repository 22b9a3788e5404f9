"""`gradscope train`: trains a workflow with instrumentation on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_INTERRUPTED = 130


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE",
            help="A preset (see 'gradscope list presets'), a YAML file, or a cell such as "
            "voting-shared-stack_code: workflow, shared or isolated, task, and a scale if not the smallest.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, such as train.steps=100.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run directory; by default a new one under runs/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run in --out.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole configuration as YAML and stop.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, load the model, say the plan, stop."),
    ] = False,
) -> None:
    """Train a workflow with GRPO and write a run directory; Ctrl-C ends it so that it can be resumed."""
    from gradscope.train.config import load_config, to_yaml

    config = load_config(source, overrides or ())
    if print_config:
        typer.echo(to_yaml(config), nl=False)
        return
    from gradscope.train.directory import check_out, default_out
    from gradscope.train.loop import run
    from gradscope.train.progress import RunProgress

    folder = out if out is not None else default_out(config)
    if not check_out(folder, resume=resume) and resume:
        typer.echo(f"{folder}: there is no run to go on with, so a new one starts", err=True)
    if dry_run:
        from gradscope.train.plan import describe_plan

        typer.echo(f"run directory: {folder}")
        for line in describe_plan(config):
            typer.echo(line)
        return
    with RunProgress(source, print_every=config.tracking.print_every) as progress:
        result = run(config, out=folder, resume=resume, on_step=progress)
    if result.interrupted:
        typer.echo(
            f"stopped after step {result.step}. Go on with: "
            f"gradscope train {folder / 'config.yaml'} --out {folder} --resume",
            err=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.was_done:
        typer.echo(
            f"{folder}: already at step {result.step}: nothing to do. "
            f"Give train.steps above {result.step} to go on."
        )
        return
    typer.echo(f"{result.step} steps in {folder}. Next: gradscope diagnose {folder}")
