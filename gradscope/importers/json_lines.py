"""Lines of JSON objects, with the line named where one cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradscope.errors import DataError


def read_objects(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a JSON Lines file, and 1 if its last line is torn, which is then left out.

    Raises:
        DataError: Another line is no object, or the file cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}).") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    objects: list[dict[str, Any]] = []
    num_torn = 0
    for number, line in numbered:
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == numbered[-1][0] and objects:
                num_torn = 1
                continue
            raise DataError(
                f"{path}, line {number}: not JSON ({error}). Expected one object a line."
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {number}: {type(value).__name__}, expected an object.")
        objects.append(value)
    if not objects:
        raise DataError(f"{path}: empty, there is nothing to import.")
    return objects, num_torn


def first_object(path: Path) -> dict[str, Any]:
    """Returns the first line's object; empty when there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            value = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def torn_note(num_torn: int) -> tuple[str, ...]:
    """Returns what to say of a torn last line."""
    return ("The last line is torn, as by a crash, and left out.",) if num_torn else ()
