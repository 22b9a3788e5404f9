"""The flat scalar mirror `metrics.jsonl`: one JSON object a training step, for tools that read lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradscope.runfile import durable
from gradscope.runfile.columns import number
from gradscope.runfile.update import UpdateRecord, update_paths

_ENCODER = json.JSONEncoder(default=str)
_FLOAT = frozenset({float})


class MetricsMirror:
    """Appends one line a step; nested names are joined by `/`.

    Numbers of an update are called `updates/POLICY/NAME`, or `updates/POLICY/MINIBATCH/NAME` where the policy
    had several in the step.

    Args:
        path: The file.
        keep_to_step: When a run is resumed, its checkpoint's step: lines of later steps are dropped.

    Attributes:
        num_foreign: Lines found there that are no training step; they are kept.
    """

    def __init__(self, path: Path, *, keep_to_step: int | None) -> None:
        self._path = path
        kept, self.num_foreign = ([], 0) if keep_to_step is None else _lines_up_to(path, keep_to_step)
        temporary = path.with_name(path.name + ".tmp")
        durable.write_whole(temporary, b"".join(kept))
        durable.rename(temporary, path)
        durable.sync(path.parent)
        self._open()

    @property
    def foreign_notice(self) -> str:
        """What to say of foreign lines."""
        return f"{self._path}: {self.num_foreign} lines are no training step; they are kept."

    def append(self, step: int, records: Sequence[UpdateRecord], metrics: Mapping[str, Any]) -> bool:
        """Writes the line of one step; says whether the disk took it."""
        line: dict[str, Any] = {"step": step}
        _flatten("", metrics, line)
        line |= _updates(records)
        line["step"] = step  # also where the caller logs something of that name
        data = (_ENCODER.encode(line) + "\n").encode()
        try:
            if not self._is_in_place():
                self._file.close()
                self._open()
            written = self._file.write(data)
        except OSError:
            return False
        if written == len(data):
            self._good_bytes += written
            return True
        return self._take_back()

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed in close)
        self._good_bytes = os.fstat(self._file.fileno()).st_size

    def _is_in_place(self) -> bool:
        """Returns whether the file is still there by its name; it has gone with a folder that went away."""
        try:
            return not self._file.closed and os.path.samestat(
                os.fstat(self._file.fileno()), os.stat(self._path)
            )
        except FileNotFoundError:
            return False

    def _take_back(self) -> bool:
        with contextlib.suppress(OSError):  # then a torn line stays, which readers of lines pass over
            durable.cut(self._file.fileno(), self._good_bytes)
        return False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _flatten(prefix: str, values: Mapping[str, Any], line: dict[str, Any]) -> None:
    """Puts the values into a line under their paths."""
    for name, value in values.items():
        path = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, (dict, Mapping)):
            if _is_finite(value.values()):
                line.update(zip(_paths(path, tuple(value)), value.values(), strict=True))
            else:
                _flatten(path, value, line)
        elif isinstance(value, str):
            line[path] = value
        elif (found := number(value)) is not None and found == found:
            # JSON has no infinity; a missing value is left out.
            line[path] = found if -math.inf < found < math.inf else None


def _is_finite(values: Collection[Any]) -> bool:
    """Returns whether all values are plain finite numbers; where their sum overflows, not."""
    return _FLOAT.issuperset(map(type, values)) and math.isfinite(sum(values))


@lru_cache(4096)
def _paths(prefix: str, names: tuple[Any, ...]) -> list[str]:
    """Returns the paths of the entries of a mapping, the same ones step after step."""
    return [f"{prefix}/{name}" for name in names]


def _updates(records: Sequence[UpdateRecord]) -> dict[str, Any]:
    """Returns the numbers of a step's updates by policy, and by minibatch where it had several."""
    values: dict[str, Any] = {}
    for path, record in zip(update_paths(records), records, strict=True):
        _flatten(path, record.scalars, values)
    return values


def _lines_up_to(path: Path, step: int) -> tuple[list[bytes], int]:
    """Returns the whole lines without those of later steps, and how many are no step at all."""
    kept: list[bytes] = []
    num_foreign = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # torn by a crash; the run file has that step
        own = value.get("step") if isinstance(value, dict) else None
        if not isinstance(own, int | float) or math.isnan(own):
            num_foreign += 1
        elif own > step:
            continue
        kept.append(line + b"\n")
    return kept, num_foreign
