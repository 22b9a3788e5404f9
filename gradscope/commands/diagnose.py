"""`gradscope diagnose`: what went wrong in a saved run, how sure that is, what the log cannot tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory or run.h5.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="KINDS",
            help="Exit 1 when one of these is found, such as cliff,capture,amplification. What is merely "
            "'possible' does not count, nor does 'dominance' (of kind capture) as capture.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what went wrong in the saved RUN, how sure that is, and what its log cannot tell."""
    from gradscope.diagnosis import asked_for, untold
    from gradscope.diagnosis import diagnose as judge

    kinds = [] if fail_on is None else _kinds(fail_on)
    diagnosis = judge(run)
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        from gradscope.report.text import render

        typer.echo(render(diagnosis), nl=False)
    if diagnosis.broken:
        print("\n".join(diagnosis.broken.values()), file=sys.stderr)
        raise typer.Exit(3)
    for kind in untold(diagnosis, kinds):
        reason = diagnosis.skipped.get(kind, "too little data, see above")
        print(f"gradscope: warning: --fail-on {kind}: it could not be told ({reason}).", file=sys.stderr)
    if asked_for(diagnosis, kinds):
        raise typer.Exit(1)


def _kinds(fail_on: str) -> list[str]:
    """Returns the kinds in a comma-separated list, or says which one nobody looks for."""
    from gradscope.detectors import DETECTORS
    from gradscope.errors import ConfigError, unknown_name

    kinds = list(dict.fromkeys(kind.strip() for kind in fail_on.split(",") if kind.strip()))
    if not kinds:
        raise ConfigError(
            f"--fail-on '{fail_on}' names no kind of finding. Allowed: {', '.join(DETECTORS.names())}."
        )
    for kind in kinds:
        if kind not in DETECTORS:
            raise unknown_name("kind of finding", kind, DETECTORS.names(), where="--fail-on")
    return kinds
