"""Tries what the run file relies on in a folder: see 'What survives what' in docs/run-file.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradscope.runfile import durable

ROOM_BYTES = 10**9
"""Free space below which a folder is warned of; a run of 10,000 steps of 200 modules takes 60 MB, twice."""
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p", "glusterfs")
_VOLATILE = ("tmpfs", "ramfs")
_READ = "import sys; sys.stdout.write(open(sys.argv[1]).read())"


@dataclass(frozen=True)
class Promise:
    """What was found of one promise, and what to do when it is not kept, or kept with a reservation."""

    name: str
    is_kept: bool
    found: str
    advice: str = ""


def check_folder(folder: Path) -> list[Promise]:
    """Returns what the file system under an existing folder keeps of what the run file needs."""
    tests: dict[str, Callable[[Path], str]] = {
        "append in one write": _append,
        "replace a file whole": _replace,
        "others see the new file": _show,
        "sync files and folders": _sync,
        "touch a file": _touch,
    }
    promises = [_kind(folder), _room(folder)]
    for name, test in tests.items():
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".gradscope-doctor-") as scratch:
                promises.append(Promise(name, True, test(Path(scratch))))
        except OSError as error:
            advice = "Runs written here may not survive a crash; write them to a local disk."
            promises.append(Promise(name, False, " ".join(str(error).split()), advice))
    return promises


def _kind(folder: Path) -> Promise:
    """Says what file system it is; none is refused for its name."""
    kind = file_system_of(folder)
    advice = ""
    if kind in _VOLATILE:
        advice = "It is in memory: runs written here are gone after a restart of the machine."
    if kind in _NETWORK:
        advice = "A network file system: readers on other machines may be a minute behind, never wrong."
    return Promise("kind", True, f"{kind or 'unknown'} under {folder.resolve()}", advice)


def file_system_of(folder: Path) -> str:
    """Returns the type of the file system that holds a folder; empty where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    place = folder.resolve()
    found = ""
    longest = -1
    for _, mount, kind, *_ in (line.split() for line in lines):
        point = Path(mount.replace("\\040", " "))
        # Of two mounts at one point the later one is on top.
        if place.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = kind, len(point.parts)
    return found


def _room(folder: Path) -> Promise:
    free = shutil.disk_usage(folder).free
    advice = "" if free >= ROOM_BYTES else "Little room: logging goes on in memory while the disk is full."
    return Promise("room", free > 0, f"{free / 1e9:.1f} GB free", advice)


def _append(scratch: Path) -> str:
    file = scratch / "journal"
    descriptor = durable.create(file)
    try:
        for part in (b"first", b"second"):
            if durable.append(descriptor, part) != len(part):
                raise OSError("a write of a few bytes came back short")
        durable.cut(descriptor, 8)
        durable.append(descriptor, b"third")
    finally:
        os.close(descriptor)
    if file.read_bytes() != b"firstsecthird":
        raise OSError("appended bytes are not at the end")
    return "whole, and taken back by ftruncate"


def _replace(scratch: Path) -> str:
    old, new = scratch / "run", scratch / "run.new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with old.open("rb") as reader:
        durable.rename(new, old)
        if reader.read() != b"old" or old.read_bytes() != b"new":
            raise OSError("a renamed file does not take the place of another in one step")
    return "those who had the old file open go on reading it"


def _show(scratch: Path) -> str:
    file, new = scratch / "run", scratch / "run.new"
    for text in ("first", "second"):
        new.write_text(text)
        durable.rename(new, file)
        command = [sys.executable, "-S", "-c", _READ, str(file)]
        seen = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
        if seen != text:
            raise OSError(f"another process read {seen!r} after a rename, not {text!r}")
    return "another process on this machine reads it at once"


def _sync(scratch: Path) -> str:
    file = scratch / "journal"
    descriptor = durable.create(file)
    begin = time.perf_counter()
    try:
        durable.append(descriptor, b"record")
        durable.sync_data(descriptor)
    finally:
        os.close(descriptor)
    durable.sync(scratch)
    return f"{1e3 * (time.perf_counter() - begin):.1f} ms, the price of a step with run.fsync=record"


def _touch(scratch: Path) -> str:
    file = scratch / "lock"
    file.write_bytes(b"")
    os.utime(file, (1, 1))
    if file.stat().st_mtime != 1:
        raise OSError("the time of a file cannot be set, by which writers show that they are alive")
    return "by which writers elsewhere show that they are alive"
