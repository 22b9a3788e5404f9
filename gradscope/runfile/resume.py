"""Where a writer starts: at the beginning of a new run, or at a checkpoint of one that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradscope.errors import RunFileError, SchemaError
from gradscope.runfile import compaction
from gradscope.runfile.content import resumed, spanned
from gradscope.runfile.layout import Layout
from gradscope.runfile.load import Loaded, load
from gradscope.runfile.paths import RunPaths

_NUMBERED = ("updates", "modules", "rows", "eval", "events", "segments")
_KEPT = ("run_id", "created_at")


@dataclass(frozen=True)
class Start:
    """The state that a writer begins with.

    Attributes:
        layout: Labels.
        attributes: Root attributes.
        from_step: Step of the checkpoint; None in a new run.
        next_numbers: Table to the running number of its next row.
        sequence: Number of the last journal record so far.
        journal_number: Number of the first journal to write.
        num_steps: Steps that the run file holds.
        events: Kind and message of what there is to say about the start.
    """

    layout: Layout
    attributes: Mapping[str, Any]
    from_step: int | None = None
    next_numbers: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_NUMBERED, 0))
    sequence: int = 0
    journal_number: int = 0
    num_steps: int = 0
    events: tuple[tuple[str, str], ...] = ()


def fresh_start(paths: RunPaths, layout: Layout, attributes: Mapping[str, Any]) -> Start:
    """Returns the start of a new run.

    Raises:
        RunFileError: A run is there already.
    """
    if paths.exists():
        raise RunFileError(
            f"{paths.directory}: holds a run already ({paths.file.name}). "
            "Resume it (resume_from_step=, --resume) or write to another path."
        )
    return Start(layout, attributes)


def resumed_start(paths: RunPaths, layout: Layout, attributes: Mapping[str, Any], *, from_step: int) -> Start:
    """Returns the start of a new segment, after moving rows of later steps to `/superseded`.

    Args:
        paths: Of the run.
        layout: Labels that the writer brings; new ones go behind those that are there.
        attributes: Root attributes of the new segment; name and birth of the run stay.
        from_step: Step of the checkpoint.

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
    content = resumed(old, from_step=from_step).widened(merged)
    content = spanned(content.with_rows([], merged, {**attributes, **kept}))
    journal_number = max(paths.journals(), default=-1) + 1
    compaction.replace(paths, content)
    return Start(
        merged,
        {**attributes, **kept},
        from_step,
        {table: content.next_number(table) for table in _NUMBERED},
        int(old.attributes.get("journal_sequence", 0)),
        journal_number,
        len(content.tables.get("train", {}).get("step", ())),
        tuple(_events(loaded, len(old.tables.get("train", {}).get("step", ())), content, from_step)),
    )


def _events(loaded: Loaded, num_before: int, content: Any, from_step: int) -> list[tuple[str, str]]:
    num_moved = num_before - len(content.tables.get("train", {}).get("step", ()))
    segment = content.next_number("segments")
    events = [
        ("resume", f"Segment {segment} goes on from step {from_step}; {num_moved} later steps moved aside.")
    ]
    if loaded.num_missing:
        events.append(("dropped_records", f"{loaded.num_missing} records of the journal were damaged."))
    return events


def _check_same_slots(paths: RunPaths, old: Layout, new: Layout) -> None:
    for kind, values in (("role", "slot_role"), ("policy", "slot_policy")):
        before = dict(zip(old.labels["slot"], getattr(old, values), strict=True))
        for slot, value in zip(new.labels["slot"], getattr(new, values), strict=True):
            if before.get(slot, value) != value:
                raise SchemaError(
                    f"{paths.file}: slot '{slot}' has {kind} '{before[slot]}', now '{value}'. "
                    "A resumed run keeps its slots' roles and policies; start a new run for others."
                )
