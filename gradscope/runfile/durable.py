"""The system calls by which a run's journals and files change, and files that are whole after a crash.

Only the mirror's appending, the signing and touching of locks, and copies of what is salvaged go another way.
What survives a loss of power is decided here and nowhere else: a write by `sync` of its file, a name by
`sync` of its folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from gradscope.errors import SchemaError

Fsync = Literal["never", "checkpoint", "record"]
"""When journals are forced to the disk: never, whenever `compact` is called, or with every record.

A crash of the process costs nothing under any of them; they are about loss of power and of the machine.
"""


def checked_fsync(policy: str) -> Fsync:
    """Returns the policy.

    Raises:
        SchemaError: There is none of that name.
    """
    for known in get_args(Fsync):
        if policy == known:
            return known
    raise SchemaError(f"fsync: {policy!r} is no policy. Allowed: {', '.join(get_args(Fsync))}.")


def create(path: Path) -> int:
    """Returns a descriptor of a new, empty file that is read and appended to; one of that name is emptied."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)


def append(descriptor: int, data: bytes | memoryview) -> int:
    """Appends in one write; returns how many bytes the disk took."""
    return os.write(descriptor, data)


def append_whole(descriptor: int, data: bytes) -> None:
    """Appends all of the bytes, in as many writes as that takes.

    Raises:
        OSError: The disk is full, say; part of them may be there.
    """
    rest = memoryview(data)
    while rest:  # one call writes at most 2 GB, or up to where the disk is full; then the next raises
        rest = rest[append(descriptor, rest) :]


def cut(descriptor: int, num_bytes: int) -> None:
    """Shortens a file."""
    os.ftruncate(descriptor, num_bytes)


def sync_data(descriptor: int) -> None:
    """Waits until what has been written to an open file is on the disk."""
    os.fdatasync(descriptor)


def rename(path: Path, target: Path) -> None:
    """Gives a file another name in one step; a file that has that name is gone with it."""
    os.replace(path, target)


def remove(path: Path) -> None:
    """Deletes a file, if it is there."""
    path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(target: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk.

    Raises:
        OSError: The disk is full, say; there is no file `target` then.
    """
    descriptor = create(target)
    try:
        append_whole(descriptor, data)
        sync_data(descriptor)
    except BaseException:
        remove(target)
        raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Puts a text file in its place once all of it is on the disk."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    sync(scratch)
    rename(scratch, path)
    sync(path.parent)
