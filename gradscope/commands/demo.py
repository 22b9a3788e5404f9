"""`gradscope demo`: a tiny workflow trained under two policies, both runs diagnosed and compared."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

ROUTINGS = ("shared", "isolated")
WIDTH = 100


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the two run directories.")] = Path(
        "runs"
    ),
) -> None:
    """Train Voting under a shared and an isolated policy on a CPU, diagnose both runs, compare them."""
    from gradscope.diagnosis import diagnose
    from gradscope.report.contrast import contrast
    from gradscope.report.text import render
    from gradscope.runfile import open_run

    folders = _free_folders(out)
    for routing, folder in folders.items():
        _train(routing, folder)
    runs = {f"{routing} policy": open_run(folder) for routing, folder in folders.items()}
    for folder, run in zip(folders.values(), runs.values(), strict=True):
        typer.echo()
        typer.echo(render(diagnose(run, name=str(folder))), nl=False)
    typer.echo("\nThe two runs side by side")
    for sentence in contrast(runs):
        typer.echo(
            textwrap.fill(
                sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
            )
        )
    paths = " ".join(str(folder) for folder in folders.values())
    typer.echo(f"\nBoth runs are kept. To draw them: gradscope figures {paths} -o {out / 'figures'}")


def _free_folders(parent: Path) -> dict[str, Path]:
    """Returns a folder for each routing that no earlier demo has used, the same number for both."""
    for number in _numbers():
        folders = {routing: parent / f"demo-voting-{routing}{number}" for routing in ROUTINGS}
        if not any(folder.exists() for folder in folders.values()):
            return folders
    raise AssertionError("the numbers never end")


def _numbers() -> Iterator[str]:
    yield ""
    number = 2
    while True:
        yield f"-{number}"
        number += 1


def _train(routing: str, folder: Path) -> None:
    from gradscope.train import load_config, run
    from gradscope.train.progress import RunProgress

    config = load_config("demo", [f"policy.routing={routing}"])
    typer.echo(f"Training {config.workflow.name} on {config.task.name}, {routing} policy, into {folder}")
    with RunProgress(f"{config.workflow.name}, {routing}", print_every=10) as progress:
        result = run(config, out=folder, on_step=progress)
    if result.interrupted:
        typer.echo(
            f"stopped after step {result.step}. Go on with: "
            f"gradscope train {folder / 'config.yaml'} --out {folder} --resume",
            err=True,
        )
        raise typer.Exit(130)
