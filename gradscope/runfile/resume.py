"""Where a writer starts: at the beginning of a new run, or at a checkpoint of one that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradscope.errors import RunFileError, SchemaError
from gradscope.runfile import compaction
from gradscope.runfile.batch import Batch
from gradscope.runfile.columns import Row, columns_of
from gradscope.runfile.content import Content, resumed, spanned
from gradscope.runfile.damage import lost_records
from gradscope.runfile.layout import Layout
from gradscope.runfile.load import Loaded, load
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.provenance import now

_NUMBERED = ("updates", "modules", "rows", "eval", "events", "segments")
_KEPT = ("run_id", "created_at")


@dataclass(frozen=True)
class Start:
    """The state that a writer begins with.

    Attributes:
        layout: Labels.
        attributes: Root attributes.
        segment: Number of the segment that begins.
        next_numbers: Table to the running number of its next row.
        rows: Rows to write first.
        from_step: Step of the checkpoint; None in a new run.
        sequence: Number of the last journal record so far.
        journal_number: Number of the first journal to write.
        num_steps: Steps that the run file holds.
    """

    layout: Layout
    attributes: Mapping[str, Any]
    segment: int
    next_numbers: Mapping[str, int]
    rows: Batch = field(default_factory=dict)
    from_step: int | None = None
    sequence: int = 0
    journal_number: int = 0
    num_steps: int = 0


def start(
    paths: RunPaths,
    layout: Layout,
    attributes: Mapping[str, Any],
    *,
    from_step: int | None,
    world_size: int,
) -> Start:
    """Returns the start of a new run, or of a new segment where `from_step` names a checkpoint.

    Raises as `fresh_start` and `resumed_start` do.
    """
    if from_step is None:
        return fresh_start(paths, layout, attributes, world_size=world_size)
    return resumed_start(paths, layout, attributes, from_step=from_step, world_size=world_size)


def fresh_start(paths: RunPaths, layout: Layout, attributes: Mapping[str, Any], *, world_size: int) -> Start:
    """Returns the start of a new run.

    Raises:
        RunFileError: A run is there already.
    """
    if paths.exists():
        raise RunFileError(
            f"{paths.directory}: holds a run already ({paths.file.name}). "
            "Resume it (resume_from_step=, --resume) or write to another path."
        )
    segment = _segment_row(0, attributes, resumed_from=None, world_size=world_size)
    rows = {"segments": columns_of("segments", [segment], layout, _never)}
    return Start(layout, attributes, 0, {**dict.fromkeys(_NUMBERED, 0), "segments": 1}, rows)


def resumed_start(
    paths: RunPaths, layout: Layout, attributes: Mapping[str, Any], *, from_step: int, world_size: int
) -> Start:
    """Returns the start of a new segment, after moving rows of later steps to `/superseded`.

    The segment's own row comes into the file together with that move, so a crash leaves both or neither.

    Args:
        paths: Of the run.
        layout: Labels that the writer brings; new ones go behind those that are there.
        attributes: Root attributes of the new segment; name and birth of the run stay.
        from_step: Step of the checkpoint.
        world_size: Number of training processes.

    Raises:
        RunFileError: There is no run, or it cannot be read.
        SchemaError: A slot has another role or policy than before.
    """
    loaded = load(paths.file if paths.file.exists() else paths.directory)
    old = loaded.content
    _check_same_slots(paths, old.layout, layout)
    slots = dict(zip(layout.labels["slot"], layout.slot_role, strict=True))
    policies = dict(zip(layout.labels["slot"], layout.slot_policy, strict=True))
    merged = old.layout.with_slots(slots, policies)
    kept = {name: value for name, value in old.attributes.items() if name in (*_KEPT, "journal_sequence")}
    attributes = {**attributes, **kept}
    content = resumed(old, from_step=from_step)
    segment = old.next_number("segments")
    rows = {
        "segments": [_segment_row(segment, attributes, resumed_from=from_step, world_size=world_size)],
        "events": _event_rows(loaded, content, from_step),
    }
    added = {table: columns_of(table, own, merged, _never) for table, own in rows.items()}
    content = spanned(content.with_rows([added], merged, attributes))
    journal_number = max(paths.journals(), default=-1) + 1
    compaction.replace(paths, content)
    return Start(
        merged,
        attributes,
        segment,
        {table: content.next_number(table) for table in _NUMBERED},
        from_step=from_step,
        sequence=int(kept.get("journal_sequence", 0)),
        journal_number=journal_number,
        num_steps=content.num_rows("train"),
    )


def _never(key: str, sentence: str) -> None:
    """Takes no notice: the rows that a start writes are the writer's own, and all fit."""
    raise AssertionError(f"{key}: {sentence}")


def _segment_row(
    segment: int, attributes: Mapping[str, Any], *, resumed_from: int | None, world_size: int
) -> Row:
    return {
        "segment": segment,
        "start_step": None,  # known when the file is written
        "end_step": None,
        "resumed_from_step": resumed_from,
        "world_size": world_size,
        "created_at": now(),
        "git_hash": attributes["git_hash"],
        "config_json": attributes["config_json"],
    }


def _event_rows(loaded: Loaded, content: Content, from_step: int) -> list[Row]:
    num_moved = loaded.content.num_rows("train") - content.num_rows("train")
    segment = content.next_number("segments")
    events = [
        ("resume", f"Segment {segment} goes on from step {from_step}; {num_moved} later steps moved aside.")
    ]
    if loaded.num_missing:
        events.append(("dropped_records", f"{lost_records(loaded.num_missing)}."))
    first = content.next_number("events")
    return [
        {"event": first + order, "step": max(from_step, 0), "kind": kind, "message": message}
        for order, (kind, message) in enumerate(events)
    ]


def _check_same_slots(paths: RunPaths, old: Layout, new: Layout) -> None:
    for kind, values in (("role", "slot_role"), ("policy", "slot_policy")):
        before = dict(zip(old.labels["slot"], getattr(old, values), strict=True))
        for slot, value in zip(new.labels["slot"], getattr(new, values), strict=True):
            if before.get(slot, value) != value:
                raise SchemaError(
                    f"{paths.file}: slot '{slot}' has {kind} '{before[slot]}', now '{value}'. "
                    "A resumed run keeps its slots' roles and policies; start a new run for others."
                )
