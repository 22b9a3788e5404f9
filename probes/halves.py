"""Which half of an update's problems a problem belongs to, the same on every process.

Each process lets its problems take turns, and processes start with different halves, so that halves are as
even as they can be. That fits together while the rows of a problem are on one process. Where they are not,
two processes may send a problem to different halves, which is seen at the step; from then on names decide.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Hashable, Mapping, Sequence

import torch

Digests = Mapping[int, int]
"""Digest of a problem -> its half."""


class Halves:
    """Divides the problems of one policy's update: each that is new goes to the other half than the last.

    Args:
        first: Half of the first problem.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._half: dict[Hashable, int] = {}
        self._by_name = False
        self._num_updates = 0

    def of(self, problem: Hashable) -> int:
        """Returns 0 or 1, the same for a problem until `clear`."""
        if problem not in self._half:
            number = len(self._half) + self.first
            if self._by_name:
                number = digest_of((self._num_updates, problem)) or 0
            self._half[problem] = number % 2
        return self._half[problem]

    def clear(self) -> None:
        """Forgets the problems: the next update starts anew."""
        self._half.clear()
        self._num_updates += 1

    def go_by_name(self) -> None:
        """Lets names decide from now on: less even, but the same wherever a problem is seen."""
        self._by_name = True

    def digests(self) -> dict[int, int] | None:
        """Returns the halves by digest; None where a problem has no name that other processes know."""
        found: dict[int, int] = {}
        for problem, half in self._half.items():
            digest = digest_of(problem)
            if digest is None:
                return None
            found[digest] = half
        return found


def first_half() -> int:
    """Returns the half with which this process starts."""
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() % 2 if started else 0


def digest_of(problem: Hashable) -> int | None:
    """Returns a 64-bit number that is the same on every process; None for objects known by their address."""
    name = _name(problem)
    if name is None:
        return None
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def find_conflict(by_process: Sequence[Digests | None]) -> str:
    """Returns why the halves of several processes do not fit together; empty where they do."""
    with_problems = [digests for digests in by_process if digests is None or digests]
    if len(with_problems) > 1 and None in with_problems:
        return (
            "problems are objects that only one process knows, so nobody can tell whether their rows are "
            "spread over processes; name them by strings or numbers"
        )
    seen: dict[int, int] = {}
    for digests in with_problems:
        for digest, half in (digests or {}).items():
            if seen.setdefault(digest, half) != half:
                return (
                    "rows of one problem are spread over processes that sent it to different halves; from "
                    "the next update on names of problems decide"
                )
    return ""


def _name(problem: Hashable) -> str | None:
    if isinstance(problem, numbers.Number):
        return f"number {hash(problem)}"  # equal numbers have equal hashes, the same in every process
    if isinstance(problem, str):
        return f"text {problem}"
    if isinstance(problem, tuple):
        names = [_name(part) for part in problem]
        return None if None in names else f"({', '.join(map(str, names))})"
    if type(problem).__repr__ is object.__repr__:
        return None
    return f"{type(problem).__name__} {problem!r}"
