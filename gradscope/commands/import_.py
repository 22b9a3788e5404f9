"""`gradscope import`: makes a run file of the log of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
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
        list[str] | None,
        typer.Option(
            "--num-total",
            metavar="[DATASET=]N",
            help="Problems of each evaluation, where only accuracy is logged; by data set if several.",
        ),
    ] = None,
    step: Annotated[str | None, typer.Option("--step", help="Key or column that holds the step.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="KEY=VALUE", help="Which rows, where a source holds several runs."),
    ] = None,
) -> None:
    """Make a run file of the log of another tool, and say what that log cannot answer."""
    from gradscope.importers.importing import Imported, import_run
    from gradscope.importers.wording import listed, plain

    made: Imported = import_run(
        sources,
        out,
        format=format_,
        dialect=dialect,
        mapping=mapping,
        role_pattern=role_pattern,
        num_total=_totals(num_total or []),
        step=step,
        where=_pairs(where or []),
    )
    typer.echo(
        f"{made.path}: {made.num_steps} steps and {made.num_evaluations} evaluations of "
        f"{listed(made.roles, most=20)} (format {made.format}, dialect {made.dialect})"
    )
    if made.unknown:
        typer.echo(
            f"  kept under /user: {len(made.unknown)} key(s) that the run file has no place for "
            f"({listed(made.unknown, most=5)})"
        )
    for note in made.notes:
        typer.echo(f"  note: {plain(note)}")
    for limit in made.limits:
        typer.echo(f"  cannot be answered: {plain(limit)}.")
    typer.echo(f"Next: gradscope diagnose {made.path}")


def _pairs(texts: list[str]) -> dict[str, str]:
    from gradscope.errors import ConfigError

    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--where {text}: expected KEY=VALUE, such as run_name=first.")
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def _totals(texts: list[str]) -> int | dict[str, int] | None:
    """Returns one number for all data sets, or data set to number."""
    from gradscope.errors import ConfigError

    found: dict[str, int] = {}
    for text in texts:
        dataset, _, number = text.rpartition("=")
        if not number.strip().lstrip("-").isdecimal() or (len(texts) > 1 and not dataset):
            raise ConfigError(f"--num-total {text}: expected a whole number, or DATASET=N for each data set.")
        found[dataset] = int(number)
    return found.get("", found) if found else None
