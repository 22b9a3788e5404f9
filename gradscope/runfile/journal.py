"""The journal that a writer appends to: one write() a record, waiting in memory while the disk is full."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from gradscope.runfile import frames
from gradscope.runfile.durable import sync
from gradscope.runfile.paths import RunPaths


@dataclass(frozen=True)
class _Waiting:
    kind: int
    data: bytes


class JournalWriter:
    """Appends records; a record that the disk does not take waits in memory and is retried with the next.

    Args:
        paths: Of the run.
        number: Number of the first journal, not yet there.
        header: The header record it begins with.
        fsync: Whether each record is forced to the disk before `append` returns.
        max_waiting: How many records may wait; beyond it the oldest are dropped and counted.

    Raises:
        OSError: The first journal cannot be created.
    """

    def __init__(
        self, paths: RunPaths, number: int, header: frames.Frame, *, fsync: bool, max_waiting: int
    ) -> None:
        self.number = number
        self.num_dropped = 0
        self._paths = paths
        self._fsync = fsync
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._descriptor, self._good_bytes = self._create(number, header)

    @property
    def num_waiting(self) -> int:
        """How many records are in memory only."""
        return len(self._waiting)

    def append(self, frame: frames.Frame) -> None:
        """Writes whatever waits and then this record, as far as the disk takes them."""
        self._waiting.append(_Waiting(frame.kind, frames.encode(frame)))
        self.flush()
        if len(self._waiting) > self._max_waiting:
            self._drop_oldest()

    def flush(self) -> None:
        """Writes what waits, as far as the disk takes it."""
        while self._waiting and self._write(self._waiting[0].data):
            self._waiting.popleft()

    def rotate(self, header: frames.Frame) -> None:
        """Goes on in a new journal.

        Raises:
            OSError: It cannot be created; the old one stays in use.
        """
        descriptor, good_bytes = self._create(self.number + 1, header)
        os.close(self._descriptor)
        self._descriptor, self._good_bytes = descriptor, good_bytes
        self.number += 1

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _create(self, number: int, header: frames.Frame) -> tuple[int, int]:
        """Makes a journal that has its header from the moment it has its name."""
        data = frames.encode(header)
        path = self._paths.journal(number)
        temporary = path.with_name(path.name + ".tmp")
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(f"{path}: no room for a new journal")
            if self._fsync:
                os.fdatasync(descriptor)
            os.replace(temporary, path)
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        if self._fsync:
            sync(self._paths.directory)
        return descriptor, len(data)

    def _write(self, data: bytes) -> bool:
        try:
            written = os.write(self._descriptor, data)
            if written == len(data) and self._fsync:
                os.fdatasync(self._descriptor)
        except OSError:
            written = 0
        if written == len(data):
            self._good_bytes += written
            return True
        try:
            os.ftruncate(self._descriptor, self._good_bytes)
        except OSError:
            # The torn record stays in the file; a scan steps over it.
            self._good_bytes = os.fstat(self._descriptor).st_size
        return False

    def _drop_oldest(self) -> None:
        for waiting in self._waiting:
            if waiting.kind == frames.ROWS_KIND:  # headers stay: later rows cannot be read without
                self._waiting.remove(waiting)
                self.num_dropped += 1
                return
