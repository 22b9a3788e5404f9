"""`gradscope migrate`: brings a run of an older schema version to the present one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def migrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory or run.h5.")],
) -> None:
    """Bring RUN to the schema version that this gradscope writes; its old file stays beside it."""
    from gradscope.runfile.migrations import migrate as bring
    from gradscope.schema import SCHEMA_VERSION

    version, kept = bring(run)
    if kept is None:
        typer.echo(f"{run}: already {version}")
    else:
        typer.echo(f"{run}: {version} -> {SCHEMA_VERSION}; the old file is {kept}")
