"""Names a process so that another one can tell whether it still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        pid: Its number.
        host: Name of its machine, for people.
        place: The boot of the machine and the set of numbers that `pid` is one of; containers on one machine
            have different ones. Empty where the system does not say.
        started: When it started, in ticks since the boot; a number that was given anew has another one. 0
            where the system does not say.
    """

    pid: int
    host: str
    place: str
    started: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Process:
        """Rebuilds a process from its fields.

        Raises:
            KeyError: One is absent.
            TypeError: There are none.
            ValueError: One is no number.
        """
        return cls(int(value["pid"]), str(value["host"]), str(value["place"]), int(value["started"]))


def myself() -> Process:
    """Returns the process that asks."""
    pid = os.getpid()
    return Process(pid, socket.gethostname(), _place(), _status(pid)[1])


def is_alive(process: Process) -> bool | None:
    """Returns whether a process runs; None where that cannot be known from here."""
    if (process.host, process.place) != (socket.gethostname(), _place()):
        return None
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state, started = _status(process.pid)
    return state not in ("Z", "X") and started == process.started


@cache
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, int]:
    """Returns the state letter and the start of a process; empty and 0 where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name in the parentheses before may hold anything
    return fields[0], int(fields[19])
