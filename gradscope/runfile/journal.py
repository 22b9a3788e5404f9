"""The journal that a writer appends to: one write() a record, waiting in memory while the disk takes none."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradscope.runfile import durable, frames
from gradscope.runfile.paths import RunPaths

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that pass once there is room; after any other a new journal is tried."""


@dataclass(frozen=True)
class _Waiting:
    kind: int
    data: bytes


class JournalWriter:
    """Appends records; a record that the disk does not take waits in memory and is retried with the next.

    A journal whose name has gone (its folder removed, renamed or unmounted) takes none: once the folder is
    back, one with all that the lost file held takes its place.

    Args:
        paths: Of the run.
        number: Number of the first journal, not yet there.
        header: The header record it begins with.
        claim: Raises OSError when the run is another writer's; asked before a journal is created.
        sync_records: Whether each record is forced to the disk before `append` returns.
        most_waiting: How many bytes of records may wait; beyond it the oldest are dropped and counted.

    Attributes:
        number: Number of the journal in use.
        num_dropped: Records dropped so far.
        trouble: Why the last record waits; None when none does.

    Raises:
        OSError: The first journal cannot be created.
    """

    def __init__(
        self,
        paths: RunPaths,
        number: int,
        header: frames.Frame,
        claim: Callable[[], None],
        *,
        sync_records: bool,
        most_waiting: int,
    ) -> None:
        self.number = number
        self.num_dropped = 0
        self.trouble: OSError | None = None
        self._paths = paths
        self._claim = claim
        self._sync_records = sync_records
        self._most_waiting = most_waiting
        self._waiting: deque[_Waiting] = deque()
        self._bytes_waiting = 0
        self._header = frames.encode(header)
        self._use(number, self._create(number, self._header), len(self._header))

    @property
    def num_waiting(self) -> int:
        """How many records are in memory only."""
        return len(self._waiting)

    def append(self, frame: frames.Frame) -> None:
        """Writes whatever waits and then this record, as far as the disk takes them."""
        data = frames.encode(frame)
        if frame.kind == frames.HEADER_KIND:
            self._header = data
        self._waiting.append(_Waiting(frame.kind, data))
        self._bytes_waiting += len(data)
        self.flush()
        while self._bytes_waiting > self._most_waiting and self._drop_oldest():
            pass

    def flush(self) -> None:
        """Writes what waits, as far as the disk takes it."""
        while self._waiting:
            try:
                self._write(self._waiting[0].data)
            except OSError as error:
                self.trouble = error
                return
            self._bytes_waiting -= len(self._waiting.popleft().data)
        self.trouble = None

    def sync(self) -> None:
        """Forces everything that has been written, here and in earlier journals, to the disk.

        Raises:
            OSError: The disk failed; what is in the journals is as readable as before.
        """
        durable.sync_data(self._descriptor)
        for number, path in self._paths.journals().items():
            if number < self.number:
                _sync_if_there(path)
        durable.sync(self._paths.directory)

    def rotate(self, header: frames.Frame) -> None:
        """Goes on in a new journal.

        Raises:
            OSError: It cannot be created; the old one stays in use.
        """
        data = frames.encode(header)
        descriptor = self._create(self.number + 1, data)
        os.close(self._descriptor)
        self._header = data
        self._use(self.number + 1, descriptor, len(data))

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _use(self, number: int, descriptor: int, num_bytes: int) -> None:
        self.number, self._descriptor, self._good_bytes = number, descriptor, num_bytes
        self._path = self._paths.journal(number)
        self._file = os.fstat(descriptor)

    def _create(self, number: int, data: bytes) -> int:
        """Makes a journal that has its beginning from the moment it has its name."""
        self._claim()
        path = self._paths.journal(number)
        temporary = path.with_name(path.name + ".tmp")
        descriptor = durable.create(temporary)
        try:
            durable.append_whole(descriptor, data)
            if self._sync_records:
                durable.sync_data(descriptor)
            durable.rename(temporary, path)
            if self._sync_records:
                durable.sync(self._paths.directory)
        except OSError:
            os.close(descriptor)
            durable.remove(temporary)
            raise
        return descriptor

    def _write(self, data: bytes) -> None:
        """Appends one record.

        Raises:
            OSError: It is not in the file.
        """
        if not self._is_in_place():
            self._replace_with(self._content())
        try:
            self._append(data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            self._replace_with(self._header)
            self._append(data)

    def _append(self, data: bytes) -> None:
        try:
            if durable.append(self._descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            if self._sync_records:
                durable.sync_data(self._descriptor)
        except OSError:
            self._take_back()
            raise
        self._good_bytes += len(data)

    def _take_back(self) -> None:
        """Cuts off a record that is not whole, or of which it is not known."""
        try:
            durable.cut(self._descriptor, self._good_bytes)
        except OSError:
            # The torn record stays in the file; a scan steps over it.
            self._good_bytes = os.fstat(self._descriptor).st_size

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), self._file)
        except FileNotFoundError:
            return False

    def _content(self) -> bytes:
        """Returns what the journal holds, which its descriptor reaches also without its name."""
        return os.pread(self._descriptor, self._good_bytes, 0)

    def _replace_with(self, data: bytes) -> None:
        """Goes on in the next journal, which begins with `data`; raises as `rotate` does."""
        descriptor = self._create(self.number + 1, data)
        os.close(self._descriptor)
        self._use(self.number + 1, descriptor, len(data))

    def _drop_oldest(self) -> bool:
        for waiting in self._waiting:
            if waiting.kind == frames.ROWS_KIND:  # headers stay: later rows cannot be read without
                self._waiting.remove(waiting)
                self._bytes_waiting -= len(waiting.data)
                self.num_dropped += 1
                return True
        return False


def _sync_if_there(path: Path) -> None:
    try:
        durable.sync(path)
    except FileNotFoundError:
        return  # compacted meanwhile; the run file has its rows and is on the disk
