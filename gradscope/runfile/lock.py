"""Keeps a second writer off a run, on any file system, without being left behind by one that died.

No lock of the kernel is used: over a network they may be absent, or be held by nobody. Each writer announces
itself in a file of its own beside the run and looks for others afterwards. Of two that begin at once at least
the later one sees the other, so never both go on.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from gradscope.errors import RunFileError
from gradscope.runfile import durable
from gradscope.runfile.process import Process, is_alive, myself

BEAT_SECONDS = 10.0
"""A writer touches its announcement this often, from a thread of its own."""
WATCH_SECONDS = 45.0
"""Without a touch for this long, a writer whose process cannot be looked up from here counts as dead."""
_POLL_SECONDS = 0.2
_UNSIGNED = ".new"
"""End of the name of an announcement that is being written."""
_released: set[str] = set()
"""Names of announcements that this process has taken back but could not delete."""


@dataclass(frozen=True)
class _Announcement:
    """A writer's file: where it stands, who signed it (None: unreadable), when it was touched last."""

    path: Path
    process: Process | None
    touched: float | None

    @property
    def name(self) -> str:
        if self.process is None:
            return f"a writer that cannot be identified ({self.path.name})"
        return f"process {self.process.pid} on {self.process.host}"


class WriterLock:
    """The right to write a run, from construction to `release`.

    Args:
        path: The lock's name; the announcements are called `NAME.ID`.

    Raises:
        RunFileError: Another writer, in this process or another, is at work on the run.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")
        self._ended = threading.Event()
        self._announce()
        threading.Thread(target=self._beat, name="gradscope-lock", daemon=True).start()

    def claim(self) -> None:
        """Makes sure that the run is still this writer's, as it is unless its folder was away.

        Raises:
            RunFileError: Another writer has taken the run.
            OSError: The folder cannot be written.
        """
        if not self._own.exists():
            self._announce()

    def release(self) -> None:
        """Gives the run free; where the announcement cannot be deleted, warns."""
        self._ended.set()
        try:
            durable.remove(self._own)
        except OSError as error:
            _released.add(self._own.name)
            warnings.warn(
                f"{self._own}: cannot be deleted ({error}); others take the run for being written until this "
                "process has ended.",
                UserWarning,
                stacklevel=2,
            )

    def _announce(self) -> None:
        temporary = self._own.with_name(self._own.name + _UNSIGNED)
        with temporary.open("w", encoding="utf-8") as file:
            place = {"inode": os.fstat(file.fileno()).st_ino, "path": str(self._own.resolve())}
            json.dump({**asdict(myself()), **place}, file)
        durable.rename(temporary, self._own)
        try:
            for other in _announcements(self._path):
                if other.path != self._own:
                    self._outlive(other)
        except BaseException:
            durable.remove(self._own)
            raise

    def _outlive(self, other: _Announcement) -> None:
        """Removes what a dead writer left behind.

        Raises:
            RunFileError: It is not dead.
        """
        alive = _is_alive(other)
        if alive is None:
            warnings.warn(
                f"{self._path.with_suffix('')}: {other.name} announced to write this run; waiting up to "
                f"{WATCH_SECONDS:.0f} s to see whether it is alive.",
                UserWarning,
                stacklevel=2,
            )
            alive = _is_touched(other)
        if alive:
            raise RunFileError(
                f"{self._path.with_suffix('')}: {other.name} is writing this run. End it first, or write "
                f"elsewhere. If it is gone for good, delete {other.path.name}."
            )
        durable.remove(other.path)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                os.utime(self._own)
            except OSError:
                continue  # the folder is away; `claim` says so where it matters


def writer_of(path: Path) -> str | None:
    """Returns who announced to write a run, `process 12 on host`; None when nobody who may be alive did."""
    for other in _announcements(path):
        if _is_alive(other) is not False:
            return other.name
    return None


def _announcements(path: Path) -> list[_Announcement]:
    files = (own for own in sorted(path.parent.iterdir()) if own.name.startswith(f"{path.name}."))
    found = (_read(own) for own in files if own.suffix != _UNSIGNED and own.name not in _released)
    return [announcement for announcement in found if announcement is not None]


def _read(path: Path) -> _Announcement | None:
    """Returns what an announcement says; None for one that is gone or came here with a copy of the run."""
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            value = json.load(file)
            # A file system may renumber its files, or be mounted under another name, but hardly both.
            if value["inode"] != status.st_ino and value["path"] != str(path.resolve()):
                return None
            return _Announcement(path, Process.from_json(value), status.st_mtime)
    except FileNotFoundError:
        return None
    except PermissionError:
        return _Announcement(path, None, None)
    except (ValueError, KeyError, TypeError):  # torn when the machine went down
        return _Announcement(path, None, path.stat().st_mtime)


def _is_alive(writer: _Announcement) -> bool | None:
    """Returns whether a writer is alive; None where its process cannot be looked up from here."""
    return None if writer.process is None else is_alive(writer.process)


def _is_touched(writer: _Announcement) -> bool:
    """Watches for a sign of life; clocks of two machines are never compared."""
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        now = _read(writer.path)
        if now is None:
            return False
        if now.touched is None or now.touched != writer.touched:
            return True
    return False
