"""Keeps a second writer off a run, without ever being left behind by one that was killed."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

from gradscope.errors import RunFileError


class WriterLock:
    """An exclusive lock on a file beside the run, which the kernel gives back when its holder dies.

    The file names the holder. Should processes that the holder forked live on and keep the lock, the holder's
    absence from this host's process table is what counts.

    Args:
        path: The lock file.

    Raises:
        RunFileError: Another writer, in this process or another, is at work on the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = self._acquire()

    def release(self) -> None:
        """Gives the lock back and deletes its file."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                os.close(descriptor)
                if holder is None or _is_alive(holder):
                    raise RunFileError(self._refusal(holder)) from None
                self.path.unlink(missing_ok=True)
                continue
            if _is_same_file(descriptor, self.path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _myself(), 0)
                return descriptor
            os.close(descriptor)  # its last holder deleted the file between our open and our lock

    def _refusal(self, holder: dict[str, object] | None) -> str:
        run = self.path.with_suffix("")
        return f"{run}: {_name(holder)} is writing this run. End it first, or write elsewhere."


def _myself() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def _name(holder: dict[str, object] | None) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "another process"


def _holder(descriptor: int) -> dict[str, object] | None:
    try:
        value = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return None  # locked a moment ago, not signed yet
    return value if isinstance(value, dict) and {"pid", "host"} <= set(value) else None


def _is_alive(holder: dict[str, object]) -> bool:
    if holder["host"] != socket.gethostname():
        return True
    try:
        os.kill(int(str(holder["pid"])), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def writer_of(path: Path) -> str | None:
    """Returns who holds a writer's lock, `process 12 on host`; None when nobody does.

    A lock file that cannot be opened counts as held.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError:
        return f"a writer whose {path.name} this user may not read"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _name(_holder(descriptor))
    finally:
        os.close(descriptor)
    return None
