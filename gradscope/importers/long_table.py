"""The one long table that every log becomes: step, role, metric, value, source key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gradscope.importers.dialect import UNKNOWN, Meaning
from gradscope.importers.log import Row
from gradscope.importers.segments import Reader, Segment
from gradscope.runfile.columns import number


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


def without_rivals(read: Reader, keys: Iterable[str]) -> Reader:
    """Returns a reader under which each meaning belongs to one key: that of the dialect's earliest rule.

    The other keys of the same meaning become unknown, so that they are kept beside it.
    """
    chosen: dict[tuple[object, ...], str] = {}
    for key in keys:
        meaning = read(key)
        rival = chosen.get(meaning.place)
        if meaning.metric and (rival is None or meaning.rank < read(rival).rank):
            chosen[meaning.place] = key
    kept = set(chosen.values())
    return lambda key: read(key) if key in kept else UNKNOWN
