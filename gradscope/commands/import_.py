"""`gradscope import`: makes a run file of the log of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="File, folder or wandb:ENTITY/PROJECT/RUN_ID; several are the parts of one run, in order.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run file (.h5) or run directory to write.")],
    format_: Annotated[
        str | None, typer.Option("--format", help="How it is stored; see 'gradscope list importers'.")
    ] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", help="Whose keys they are; see 'gradscope list dialects'.")
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option("--mapping", help="YAML file that says what the keys mean.")
    ] = None,
    role_pattern: Annotated[
        str | None,
        typer.Option(
            "--role-pattern", help="Where the role stands in a key, as in 'actor/(?P<role>[^/]+)/'."
        ),
    ] = None,
    num_total: Annotated[
        int | None,
        typer.Option("--num-total", help="Problems of each evaluation, where only accuracy is logged."),
    ] = None,
    step: Annotated[str | None, typer.Option("--step", help="Key or column that holds the step.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="KEY=VALUE", help="Which rows, where a source holds several runs."),
    ] = None,
) -> None:
    """Make a run file of the log of another tool, and say what that log cannot answer."""
    from gradscope.importers.importing import Imported, import_run

    made: Imported = import_run(
        sources,
        out,
        format=format_,
        dialect=dialect,
        mapping=mapping,
        role_pattern=role_pattern,
        num_total=num_total,
        step=step,
        where=_pairs(where or []),
    )
    typer.echo(
        f"{made.path}: {made.num_steps} steps and {made.num_evaluations} evaluations of "
        f"{', '.join(made.roles)} (format {made.format}, dialect {made.dialect})"
    )
    if made.unknown:
        shown = ", ".join(made.unknown[:5]) + (", ..." if len(made.unknown) > 5 else "")
        typer.echo(
            f"  kept under /user: {len(made.unknown)} key(s) that the run file has no place for ({shown})"
        )
    for note in made.notes:
        typer.echo(f"  note: {note}")
    for limit in made.limits:
        typer.echo(f"  cannot be answered: {limit}.")
    typer.echo(f"Next: gradscope diagnose {made.path}")


def _pairs(texts: list[str]) -> dict[str, str]:
    from gradscope.errors import ConfigError

    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--where {text}: expected KEY=VALUE, such as run_name=first.")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}
