"""The one long table that every log becomes: step, role, metric, value, source key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gradscope.importers.dialect import UNKNOWN, Meaning
from gradscope.importers.log import Row
from gradscope.importers.segments import Reader, Segment
from gradscope.runfile.columns import number, text
from gradscope.schema import TABLES


@dataclass(frozen=True)
class Entry:
    """One number of a log.

    Attributes:
        segment: Stretch of the run between resumes.
        step: Training step.
        meaning: What its key stands for.
        value: The number.
        source_key: The key.
    """

    segment: int
    step: int
    meaning: Meaning
    value: float
    source_key: str

    @property
    def role(self) -> str:
        """The role that it concerns; empty where the key names none."""
        return self.meaning.role

    @property
    def metric(self) -> str:
        """Its name in the run file; empty where nobody knows the key."""
        return self.meaning.metric


def entries(segments: Sequence[Segment], read: Reader) -> list[Entry]:
    """Returns what the segments' training steps hold, by segment and step."""
    return [
        entry
        for place, segment in enumerate(segments)
        for step in sorted(segment.steps)
        for entry in of_row(place, segment.steps[step], read)
    ]


def of_row(segment: int, row: Row, read: Reader) -> Iterator[Entry]:
    """Yields the numbers of one row."""
    for key, value in row.values.items():
        found = number(value)
        if found is not None:
            yield Entry(segment, int(row.counter), read(key), found, key)


def without_rivals(
    read: Reader, keys: Iterable[str], place: Callable[[Meaning], tuple[object, ...]]
) -> Reader:
    """Returns a reader under which each place belongs to one key: that of the dialect's earliest rule.

    The other keys of the same place become unknown, so that they are kept beside it.
    """
    chosen: dict[tuple[object, ...], str] = {}
    rivals: set[str] = set()
    for key in keys:
        meaning = read(key)
        if not meaning.metric:
            continue
        rival = chosen.get(place(meaning))
        if rival is None or meaning.rank < read(rival).rank:
            chosen[place(meaning)] = key
        rivals.add(key)
    rivals -= set(chosen.values())
    return lambda key: UNKNOWN if key in rivals else read(key)


def free_names(keys: Iterable[str], read: Reader) -> tuple[dict[str, str], list[str]]:
    """Returns key to the name under which what has no place is kept, and the keys that had to give way.

    It is the key itself, without `user/` where our own exports put that, unless the run file uses the name.
    The run file has `.` for `/`, so keys that differ in nothing else get a number.
    """
    names: dict[str, str] = {}
    renamed: list[str] = []
    taken: dict[str, str] = {}
    for key in keys:
        name = read(key).labels.get("user", key)
        if TABLES["train"].variable(name) or TABLES["updates"].variable(name):
            name = f"source.{name}"
        stem, count = name, 1
        while taken.setdefault(_stored(name), key) != key:
            count += 1
            name = f"{stem}_{count}"
        if count > 1 and not read(key).metric:
            renamed.append(key)
        names[key] = name
    return names, renamed


def _stored(name: str) -> str:
    """Returns a name as the run file stores it."""
    return text(name).replace("/", ".").strip(". ") or "unnamed"
