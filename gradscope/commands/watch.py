"""`gradscope watch`: shows a run in the terminal while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory or run.h5, also one that is copied here.")
    ],
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between looks at the files.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the run as it is now and stop.")] = False,
) -> None:
    """Show RUN while it grows: reward, accuracy, norms, shares, coherence and alarms; Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from gradscope.watch.alarms import Alarms
    from gradscope.watch.follow import follow, look
    from gradscope.watch.snapshot import Snapshot
    from gradscope.watch.view import view

    console = Console(highlight=False)
    first = look(run, Alarms())
    if once:
        console.print(view(first, width=console.width))
        return

    with Live(view(first, width=console.width), console=console, auto_refresh=False) as live:

        def show(what: Snapshot | str) -> None:
            live.update(
                Text(what) if isinstance(what, str) else view(what, width=console.width), refresh=True
            )

        try:
            follow(run, show, interval=interval)
        except KeyboardInterrupt:
            return
