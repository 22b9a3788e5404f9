"""Moves rows from closed journals into the run file, which is only ever replaced whole.

A crash at any moment leaves either the old file with its journals or the new file; journals that outlive
their compaction do no harm, since the file says up to which record it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.runfile import durable, store
from gradscope.runfile.batch import join
from gradscope.runfile.content import Content
from gradscope.runfile.journals import journals_of_run, scan_file
from gradscope.runfile.load import Pending, empty_content, pending_rows, read_file, read_head
from gradscope.runfile.paths import RunPaths


@dataclass(frozen=True)
class Task:
    """What a compaction is to do.

    Attributes:
        file: The run file.
        before: Number of the journal that is still written to; those below are folded in.
        attributes: Root attributes to set.
        most_spread: How many times the size of its data the file may have before it is made anew.
    """

    file: Path
    before: int
    attributes: Mapping[str, Any]
    most_spread: float = 2.0

    @property
    def paths(self) -> RunPaths:
        """Paths of the run."""
        return RunPaths(self.file)

    def journals(self) -> list[Path]:
        """Returns the journals to fold in, oldest first."""
        return [path for number, path in self.paths.journals().items() if number < self.before]

    def num_bytes(self) -> int:
        """Returns how large the files are that have to be read."""
        files = [self.file, *self.journals()]
        return sum(path.stat().st_size for path in files if path.exists())


def build(task: Task, target: Path) -> int:
    """Writes the new run file under a name of its own, safely on the disk.

    Returns:
        How many numbered records were found nowhere, lost to damage of a journal.

    Raises:
        OSError: The disk is full, say, or the run file is another run's; there is no file `target` then.
    """
    paths = task.paths
    stored = read_head(paths.file) if paths.file.exists() else None
    scans = [scan_file(path) for path in task.journals()]
    journals = journals_of_run(paths, scans, None if stored is None else stored.attributes.get("run_id"))
    base = stored or empty_content(journals)
    rows = pending_rows(journals, base)
    attributes = {**task.attributes, "journal_sequence": rows.last_sequence}
    durable.write_whole(target, _merged(paths, base, rows, attributes, most_spread=task.most_spread))
    return rows.num_missing


def compact(task: Task, claim: Callable[[], None], *, make: Callable[[Task, Path], int] = build) -> int:
    """Folds journals into the run file and deletes them.

    Args:
        task: What to do.
        claim: Raises OSError when the run is not the caller's any more; asked before anything changes.
        make: Builds the new file.

    Returns:
        What `build` returns.

    Raises:
        OSError: As for `build`; all files are as before.
    """
    folded = task.journals()
    target = task.paths.temporary()
    num_missing = make(task, target)
    publish(task.paths, target, claim)
    delete(folded)
    return num_missing


def _merged(
    paths: RunPaths, base: Content, rows: Pending, attributes: Mapping[str, Any], *, most_spread: float
) -> bytes:
    """Returns the run file with rows added: grown where that does, else made anew."""
    name = str(paths.temporary())
    exists = paths.file.exists()
    if exists and rows.layout.identity == base.layout.identity:
        added = join(rows.batches, rows.layout)
        grown = store.grown(paths.file.read_bytes(), added, rows.layout, attributes, name=name)
        if grown.spread <= most_spread:
            return grown.data
    whole = read_file(paths.file) if exists else base
    return store.image(whole.with_rows(rows.batches, rows.layout, attributes), name=name)


def replace(paths: RunPaths, content: Content) -> None:
    """Puts a whole run in the place of what is there and deletes its journals.

    Raises:
        OSError: As for `build`.
    """
    journals = list(paths.journals().values())
    left_behind = paths.left_behind()
    target = paths.temporary()
    durable.write_whole(target, store.image(content, name=str(target)))
    publish(paths, target, lambda: None)
    delete([*journals, *left_behind])


def publish(paths: RunPaths, target: Path, claim: Callable[[], None]) -> None:
    """Makes a file that is on the disk the run file.

    Raises:
        OSError: The run file is as before.
    """
    try:
        claim()
        durable.rename(target, paths.file)
    except BaseException:
        durable.remove(target)
        raise
    durable.sync(paths.directory)


def delete(files: Iterable[Path]) -> None:
    """Deletes journals whose rows the run file holds."""
    for path in files:
        durable.remove(path)
