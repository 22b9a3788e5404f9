"""The flat scalar mirror `metrics.jsonl`: one JSON object a training step, for tools that read lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradscope.runfile.columns import number
from gradscope.runfile.update import UpdateRecord


class MetricsMirror:
    """Appends one line a step; nested names are joined by `/`.

    Args:
        path: The file.
        keep_to_step: When a run is resumed, its checkpoint's step: lines of later steps are dropped.
    """

    def __init__(self, path: Path, *, keep_to_step: int | None) -> None:
        self._path = path
        kept = [] if keep_to_step is None else _lines_up_to(path, keep_to_step)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed in close)
        self._good_bytes = path.stat().st_size

    def append(self, step: int, records: Sequence[UpdateRecord], metrics: Mapping[str, Any]) -> bool:
        """Writes the line of one step; says whether the disk took it."""
        line = {"step": step, **dict(_flat("", metrics))}
        for record in records:
            line |= dict(_flat(f"updates/{record.policy}", record.scalars))
        data = (json.dumps(line, default=str) + "\n").encode()
        try:
            written = self._file.write(data)
        except OSError:
            written = 0
        if written == len(data):
            self._good_bytes += written
            return True
        os.ftruncate(self._file.fileno(), self._good_bytes)
        return False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float | str | None]]:
    for name, value in values.items():
        path = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from _flat(path, value)
        elif isinstance(value, str):
            yield path, value
        elif (found := number(value)) is not None and not math.isnan(found):
            # JSON has no infinity; a missing value is left out.
            yield path, found if math.isfinite(found) else None


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue  # torn by a crash; the run file has that step
    return kept
