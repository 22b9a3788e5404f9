"""What a run holds, in memory, and what a resume does to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradscope.runfile.batch import Batch, Columns, join, select
from gradscope.runfile.layout import Layout
from gradscope.schema import TABLES


@dataclass(frozen=True)
class Superseded:
    """Rows that a resume left behind, with the attributes `superseded_by` and `resumed_from_step`."""

    tables: Batch
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Content:
    """All of a run.

    Attributes:
        layout: Labels and user variables.
        attributes: Root attributes.
        tables: The rows that count.
        superseded: Group name (`segment_000`) to the rows that a resume left behind.
    """

    layout: Layout
    attributes: Mapping[str, Any]
    tables: Batch = field(default_factory=dict)
    superseded: Mapping[str, Superseded] = field(default_factory=dict)

    def widened(self, layout: Layout) -> Content:
        """Returns the same rows in a newer layout, missing where a label is new."""
        superseded = {
            name: Superseded(join([group.tables], layout), group.attributes)
            for name, group in self.superseded.items()
        }
        return Content(layout, self.attributes, join([self.tables], layout), superseded)

    def with_rows(self, batches: list[Batch], layout: Layout, attributes: Mapping[str, Any]) -> Content:
        """Returns the run with further rows at the end, in a layout that is at least as new."""
        base = self.widened(layout)
        tables = join([base.tables, *batches], layout)
        return Content(layout, {**self.attributes, **attributes}, tables, base.superseded)

    def num_rows(self, table: str) -> int:
        """Returns how many rows a table has."""
        return len(self.tables.get(table, {}).get(TABLES[table].dim, ()))

    def next_number(self, table: str) -> int:
        """Returns the running number that the next row of a table gets.

        Segments also count that only their rows tell of, their own row being lost.
        """
        dim = TABLES[table].dim
        own = self.tables.values() if table == "segments" else [self.tables.get(table, {})]
        return max((int(columns[dim].max()) + 1 for columns in own if len(columns.get(dim, ()))), default=0)


def resumed(content: Content, *, from_step: int) -> Content:
    """Returns the run as a resume from the checkpoint of `from_step` finds it.

    Rows of later steps move to the group named after the segment that ends here; segments stay.
    """
    segment = content.next_number("segments")
    kept: Batch = {}
    moved: Batch = {}
    last_update = _updates_after(content.tables, from_step)
    for table, columns in content.tables.items():
        if table == "segments":
            kept[table] = columns
            continue
        later = columns["update"] >= last_update if table == "user_updates" else columns["step"] > from_step
        kept[table] = select(columns, ~later)
        if later.any():
            moved[table] = select(columns, later)
    superseded = dict(content.superseded)
    if moved:
        attributes = {"superseded_by": segment, "resumed_from_step": from_step}
        superseded[f"segment_{segment - 1:03d}"] = Superseded(moved, attributes)
    attributes = {name: value for name, value in content.attributes.items() if name != "finished_at"}
    return Content(content.layout, attributes, kept, superseded)


def _updates_after(tables: Batch, step: int) -> int:
    updates = tables.get("updates", {})
    if "step" not in updates:
        return 0
    later = updates["update"][updates["step"] > step]
    return int(later.min()) if len(later) else np.iinfo(np.int64).max


def segment_spans(num: int, groups: Iterable[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and the last step logged in each of `num` segments, each `[num]`, -1 where none.

    Args:
        num: Number of segments.
        groups: Tables with the columns `step` and `segment`, in memory or on disk.
    """
    start = np.full(num, np.iinfo(np.int64).max)
    end = np.full(num, -1, dtype=np.int64)
    for group in groups:
        steps, segments = group["step"][...], group["segment"][...]
        known = (segments >= 0) & (segments < num)  # rows of a segment that was lost with an older file
        steps, segments = steps[known], segments[known]
        np.minimum.at(start, segments, steps)
        np.maximum.at(end, segments, steps)
    start[end < 0] = -1
    return start, end


def spanned(content: Content) -> Content:
    """Returns the run with `start_step` and `end_step` of its segments filled in."""
    segments = content.tables.get("segments")
    if segments is None:
        return content
    parts = [content.tables, *(group.tables for group in content.superseded.values())]
    groups = [part["train"] for part in parts if "train" in part]
    start, end = segment_spans(len(segments["segment"]), groups)
    filled: Columns = {**segments, "start_step": start, "end_step": end}
    return Content(
        content.layout, content.attributes, {**content.tables, "segments": filled}, content.superseded
    )
