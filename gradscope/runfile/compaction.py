"""Moves rows from closed journals into the run file, which is only ever replaced whole.

A crash at any moment leaves either the old file with its journals or the new file; journals that outlive
their compaction do no harm, since the file says up to which record it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradscope.runfile import store
from gradscope.runfile.batch import join
from gradscope.runfile.content import Content
from gradscope.runfile.durable import sync
from gradscope.runfile.journals import check_same_run, read_journal
from gradscope.runfile.load import Pending, empty_content, pending_rows, read_file, read_head
from gradscope.runfile.paths import RunPaths


def compact(paths: RunPaths, *, before: int, attributes: Mapping[str, Any], most_spread: float = 2.0) -> int:
    """Folds all journals numbered below `before` into the run file and deletes them.

    Args:
        paths: Of the run.
        before: Number of the journal that is still written to.
        attributes: Root attributes to set.
        most_spread: How many times the size of its data the file may have before it is made anew.

    Returns:
        How many numbered records were found nowhere, lost to damage of a journal.

    Raises:
        OSError: The disk is full, say, or the run file is another run's; all files are as before.
    """
    closed = {number: path for number, path in paths.journals().items() if number < before}
    journals = [read_journal(path) for path in closed.values()]
    is_first = not paths.file.exists()
    base = empty_content(journals) if is_first else read_head(paths.file)
    check_same_run(paths, journals, base.attributes)
    rows = pending_rows(journals, base)
    attributes = {**attributes, "journal_sequence": rows.last_sequence}
    publish(paths, _merged(paths, base, rows, attributes, most_spread=most_spread))
    delete(closed.values())
    return rows.num_missing


def _merged(
    paths: RunPaths, base: Content, rows: Pending, attributes: Mapping[str, Any], *, most_spread: float
) -> bytes:
    """Returns the run file with rows added: grown where that does, else made anew."""
    name = str(paths.temporary)
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
        OSError: As for `compact`.
    """
    journals = list(paths.journals().values())
    publish(paths, store.image(content, name=str(paths.temporary)))
    delete([*journals, *paths.left_behind()])


def publish(paths: RunPaths, data: bytes) -> None:
    """Makes `data` the run file, safely on disk.

    Raises:
        OSError: The disk is full, say; the run file is as before.
    """
    try:
        with open(paths.temporary, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:  # one call writes at most 2 GB, or up to where the disk is full; then the next raises
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        os.replace(paths.temporary, paths.file)
    except BaseException:
        paths.temporary.unlink(missing_ok=True)
        raise
    sync(paths.directory)


def delete(journals: Iterable[Path]) -> None:
    """Deletes journals whose rows the run file holds."""
    for path in journals:
        path.unlink(missing_ok=True)
