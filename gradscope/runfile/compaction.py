"""Moves rows from closed journals into the run file, which is only ever replaced whole.

A crash at any moment leaves either the old file with its journals or the new file; journals that outlive
their compaction do no harm, since the file says up to which record it is complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradscope.runfile import store
from gradscope.runfile.batch import join
from gradscope.runfile.content import Content
from gradscope.runfile.journal import sync_directory
from gradscope.runfile.load import empty_content, pending_rows, read_file, read_head, read_journal
from gradscope.runfile.paths import RunPaths


def compact(paths: RunPaths, *, before: int, attributes: Mapping[str, Any]) -> int:
    """Folds all journals numbered below `before` into the run file and deletes them.

    Args:
        paths: Of the run.
        before: Number of the journal that is still written to.
        attributes: Root attributes to set.

    Returns:
        How many numbered records were found nowhere, lost to damage of a journal.

    Raises:
        OSError: The disk is full, say; run file and journals are as before.
    """
    closed = {number: path for number, path in paths.journals().items() if number < before}
    journals = [read_journal(path) for path in closed.values()]
    is_first = not paths.file.exists()
    base = empty_content(journals) if is_first else read_head(paths.file)
    rows = pending_rows(journals, base)
    attributes = {**attributes, "journal_sequence": rows.last_sequence}
    name = str(paths.temporary)
    if is_first or rows.layout.identity != base.layout.identity:
        whole = base if is_first else read_file(paths.file)
        data = store.image(whole.with_rows(rows.batches, rows.layout, attributes), name=name)
    else:
        before_bytes = paths.file.read_bytes()
        data = store.grown(before_bytes, join(rows.batches, rows.layout), rows.layout, attributes, name=name)
    publish(paths, data)
    delete(closed.values())
    return rows.num_missing


def replace(paths: RunPaths, content: Content) -> None:
    """Puts a whole run in the place of what is there and deletes its journals.

    Raises:
        OSError: As for `compact`.
    """
    journals = list(paths.journals().values())
    publish(paths, store.image(content, name=str(paths.temporary)))
    delete(journals)


def publish(paths: RunPaths, data: bytes) -> None:
    """Makes `data` the run file, safely on disk.

    Raises:
        OSError: The disk is full, say; the run file is as before.
    """
    try:
        with open(paths.temporary, "wb", buffering=0) as file:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, "no room for the run file", str(paths.temporary))
            os.fsync(file.fileno())
        os.replace(paths.temporary, paths.file)
    except BaseException:
        paths.temporary.unlink(missing_ok=True)
        raise
    sync_directory(paths)


def delete(journals: Iterable[Path]) -> None:
    """Deletes journals whose rows the run file holds."""
    for path in journals:
        path.unlink(missing_ok=True)
