"""Lines of JSON objects; lines that a crash tore are left out and told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.wording import listed

NOT_JSON = (ValueError, RecursionError)
"""What `json.loads` raises: RecursionError where brackets are nested too deeply."""
MOST_TORN = 0.1
"""A file of which more than this fraction of lines (and more than one) is no JSON is something else."""


def read_objects(path: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the objects of a JSON Lines file, and what to say of lines that are left out as torn.

    Raises:
        DataError: The first line is no JSON, or more lines than crashes explain; a line is no object; or the
            file cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}).") from error
    objects: list[dict[str, Any]] = []
    torn: list[int] = []
    reason = ""
    num_lines = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        num_lines += 1
        try:
            value = json.loads(line)
        except NOT_JSON as error:
            reason = reason or f"{path}, line {number}: not JSON ({error}). Expected one object a line."
            if not objects:
                raise DataError(reason) from error
            torn.append(number)
            continue
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {number}: {type(value).__name__}, expected an object.")
        objects.append(value)
    if len(torn) > max(1, MOST_TORN * num_lines):
        raise DataError(f"{reason} {len(torn)} of {num_lines} lines are none.")
    if not objects:
        raise DataError(f"{path}: empty, there is nothing to import.")
    return objects, _torn_note(torn, is_last=bool(torn) and not any(map(str.strip, lines[torn[-1] :])))


def first_object(path: Path) -> dict[str, Any]:
    """Returns the first line's object; empty when there is none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            value = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, *NOT_JSON):
        return {}
    return value if isinstance(value, dict) else {}


def whole_object(path: Path) -> dict[str, Any]:
    """Returns the object that is the whole file; empty when the file is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, *NOT_JSON):
        return {}
    return value if isinstance(value, dict) else {}


def with_numbers(objects: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the objects with numbers that are spelled as text as numbers, and what to say of that."""
    changed: dict[str, None] = {}
    read = []
    for own in objects:
        row = dict(own)
        for key, value in own.items():
            if isinstance(value, str):
                try:
                    row[key] = float(value)
                except ValueError:
                    continue
                changed[key] = None
        read.append(row)
    if not changed:
        return read, ()
    return read, (f"{len(changed)} key(s) hold numbers as text ({listed(changed)}); they count as numbers.",)


def _torn_note(torn: list[int], *, is_last: bool) -> tuple[str, ...]:
    if not torn:
        return ()
    if is_last and len(torn) == 1:
        return ("The last line is torn, as by a crash, and left out.",)
    return (f"{len(torn)} line(s) are torn, as by a crash, and left out (line {listed(torn)}).",)
