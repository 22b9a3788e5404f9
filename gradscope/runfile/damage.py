"""What of a run is lost or cannot be used, in sentences for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradscope.runfile.frames import Damage
from gradscope.runfile.journals import Journal
from gradscope.runfile.paths import RunPaths

_JSON = {"config_json": "the configuration", "packages_json": "the list of packages"}
"""Root attributes that hold a JSON object, and what it is."""


def num_records(num: int) -> str:
    """Returns `1 record` or `2 records`."""
    return f"{num} record{'' if num == 1 else 's'}"


def lost_records(num: int) -> str:
    """Returns `1 record is lost` or `2 records are lost`."""
    return f"{num_records(num)} {'is' if num == 1 else 'are'} lost"


def where(damage: Damage) -> str:
    """Returns where damaged bytes stand and what they are."""
    if damage.unfinished:
        return "at the end, a write that did not finish"
    return f"{'at the end' if damage.at_end else 'in the middle'}, bytes that are no record"


def of_journals(
    paths: RunPaths, journals: Sequence[Journal], *, num_missing: int, has_file: bool
) -> Iterator[str]:
    """Yields what journals say of damage; a last record cut short by a crash is none.

    Args:
        paths: Of the run.
        journals: All that are there.
        num_missing: Records that were numbered but are nowhere.
        has_file: Whether the run file is there.
    """
    starts = [
        min((row.sequence for row in journal.rows), default=journal.last_told + 1) for journal in journals
    ]
    num_in_file = 0 if has_file else min(min(starts, default=1) - 1, num_missing)
    if num_in_file:
        yield (
            f"{paths.file.name} is not there and {lost_records(num_in_file)} with it; put it back beside its "
            "journals."
        )
    for journal in journals:
        for damage in journal.damages:
            if not damage.unfinished:
                yield f"{journal.name}: {damage.num_bytes} bytes from {damage.offset}, {where(damage)}."
        if journal.num_foreign:
            yield f"{journal.name}: {num_records(journal.num_foreign)} of another run, left out."
    if num_missing > num_in_file:
        yield f"{lost_records(num_missing - num_in_file)} from the journals."


def usable(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns root attributes in which each JSON object can be parsed, and what had to be left out."""
    kept, sentences = dict(attributes), []
    for name, what in _JSON.items():
        if name in kept and not _is_json_object(kept[name]):
            kept[name] = "{}"
            sentences.append(f"The attribute {name} is no JSON object; {what} counts as absent.")
    return kept, sentences


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError):
        return False
