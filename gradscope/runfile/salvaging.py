"""Watches over the process that reads a damaged HDF5 file, and goes on without what makes it hang."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.runfile.child import command, order
from gradscope.runfile.durable import remove
from gradscope.runfile.salvage import salvage
from gradscope.runfile.superblock import opened_up

PATIENCE_SECONDS = 20.0
"""Without a word for this long the child counts as hanging."""
_MOST_ATTEMPTS = 50


@dataclass(frozen=True)
class Salvaged:
    """What became of a file: datasets that were read whole, and what was lost, a sentence each."""

    num_whole: int
    lost: tuple[str, ...]


def salvage_in_child(source: Path, target: Path) -> Salvaged:
    """Writes a copy of what is readable of a damaged file; there is no file `target` when nothing is."""
    _, wrong = opened_up(source.read_bytes())
    skipped: dict[str, str] = {}
    for _ in range(_MOST_ATTEMPTS):
        last, result = _attempt(source, target, list(skipped))
        if result is not None:
            return Salvaged(result["num_whole"], (*wrong, *result["lost"], *skipped.values()))
        what = "the whole file" if last == "/" else last
        skipped[last] = f"{what} (HDF5 crashes or hangs on it)"
        if last == "/":
            break
    remove(target)
    return Salvaged(0, (*wrong, *skipped.values()))


def _attempt(source: Path, target: Path, skip: list[str]) -> tuple[str, dict[str, Any] | None]:
    """Returns the last object that was looked at, and the result if the child came to an end."""
    task = order(__name__, source=str(source.absolute()), target=str(target.absolute()), skip=skip)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command(), **pipes) as child:  # type: ignore[call-overload]
        child.stdin.write(task.encode())
        child.stdin.close()
        text = b""
        while select.select([child.stdout], [], [], PATIENCE_SECONDS)[0]:
            piece = os.read(child.stdout.fileno(), 65_536)
            if not piece:
                break
            text += piece
        child.kill()
    lines = text.decode().splitlines() or ["/"]
    return (lines[-1], None) if lines[-1].startswith("/") else ("", json.loads(lines[-1]))


def main(task: Mapping[str, Any]) -> None:
    """Is the child: names each object before it looks at it, and at last prints what became of all."""
    result = salvage(
        Path(task["source"]),
        Path(task["target"]),
        frozenset(task["skip"]),
        lambda place: print(place, flush=True),
    )
    print(json.dumps({"num_whole": result.num_whole, "lost": result.lost}), flush=True)
