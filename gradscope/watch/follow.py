"""Follows the files of a run: reads it again whenever they have changed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

from gradscope.errors import RunFileError
from gradscope.runfile import open_run
from gradscope.runfile.paths import RunPaths
from gradscope.watch.alarms import Alarms
from gradscope.watch.snapshot import Snapshot, take

LARGEST_SHARE = 0.1
"""Of its time a watcher spends at most this on reading, so that a long run is read less often."""

Signature = tuple[tuple[str, int, int], ...]


def look(path: Path, alarms: Alarms) -> Snapshot:
    """Returns the run at `path` as it is now.

    Raises:
        RunFileError: There is no readable run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # damage is part of what is shown
        run = open_run(path)
    return take(run, alarms)


def follow(
    path: Path,
    show: Callable[[Snapshot | str], object],
    *,
    interval: float,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Shows the run whenever its files have changed, until it is interrupted.

    A run that cannot be read for a while, as one that is being moved or resumed, is shown as such a sentence.

    Args:
        path: Run directory or run.h5.
        show: Takes a snapshot, or a sentence.
        interval: Seconds between looks at the files, more where reading takes long.
        wait: Waits that many seconds; raises KeyboardInterrupt to end it.
    """
    alarms = Alarms()
    known: Signature | None = None
    while True:
        took = 0.0
        signature = signature_of(path)
        if signature != known:
            begin = time.monotonic()
            try:
                show(look(path, alarms))
                known = signature
            except RunFileError as error:
                show(str(error))
            took = time.monotonic() - begin
        wait(max(interval, took / LARGEST_SHARE))


def signature_of(path: Path) -> Signature:
    """Returns name, size and time of the run's files; those that go away meanwhile are left out."""
    paths = RunPaths.of(path)
    found = []
    for file in (paths.file, *paths.journals().values()):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)
