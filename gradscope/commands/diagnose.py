"""`gradscope diagnose`: what went wrong in a saved run, how sure that is, what the log cannot tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory or run.h5.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            metavar="KINDS",
            help="Exit 1 when one of these is found, such as cliff,capture,amplification.",
        ),
    ] = "",
) -> None:
    """Say what went wrong in the saved RUN, how sure that is, and what its log cannot tell."""
    from gradscope.diagnosis import asked_for
    from gradscope.diagnosis import diagnose as judge
    from gradscope.runfile import open_run

    kinds = _kinds(fail_on)
    diagnosis = judge(open_run(run), name=str(run))
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        from gradscope.report.text import render

        typer.echo(render(diagnosis), nl=False)
    if diagnosis.broken:
        print("\n".join(diagnosis.broken.values()), file=sys.stderr)
        raise typer.Exit(3)
    if asked_for(diagnosis, kinds):
        raise typer.Exit(1)


def _kinds(fail_on: str) -> list[str]:
    """Returns the kinds in a comma-separated list, or says which one nobody looks for."""
    from gradscope.detectors import DETECTORS
    from gradscope.errors import unknown_name

    kinds = [kind.strip() for kind in fail_on.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in DETECTORS:
            raise unknown_name("kind of finding", kind, DETECTORS.names(), where="--fail-on")
    return kinds
