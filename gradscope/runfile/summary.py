"""What a run's files hold, as plain values: groups, steps, gaps, segments, sizes, journals, damage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.runfile.batch import Batch, num_rows
from gradscope.runfile.content import Content
from gradscope.runfile.damage import where
from gradscope.runfile.journals import Journal
from gradscope.runfile.layout import Layout
from gradscope.runfile.load import Loaded, load, open_unlocked
from gradscope.runfile.lock import writer_of
from gradscope.schema import TABLES

_PROVENANCE = ("run_id", "gradscope_version", "created_at", "git_hash", "seed", "hardware")


def summarize(path: str | Path) -> dict[str, Any]:
    """Returns what the run in a run directory or run file holds; only JSON values.

    Raises:
        RunFileError: As for `open_run`.
    """
    loaded = load(path)
    content = loaded.content
    return {
        "run": str(path),
        "schema_version": content.attributes["schema_version"],
        "state": _state(loaded),
        "provenance": _provenance(content),
        "labels": {name: list(labels) for name, labels in content.layout.labels.items()},
        "slots": {
            slot: {"role": role, "policy": policy}
            for slot, role, policy in zip(
                content.layout.labels["slot"],
                content.layout.slot_role,
                content.layout.slot_policy,
                strict=True,
            )
        },
        "steps": _steps(content),
        "updates": _counts(content.tables, "updates", "policy"),
        "evaluations": _counts(content.tables, "eval", "dataset"),
        "events": _counts(content.tables, "events", "kind"),
        "segments": _segments(content),
        "superseded": {
            name: {"num_steps": num_rows(group.tables["train"], "train") if "train" in group.tables else 0,
                   **group.attributes}
            for name, group in content.superseded.items()
        },
        "groups": _groups(content.tables, content.layout, _stored_bytes(loaded)),
        "files": _files(loaded),
        "journals": [_journal(journal) for journal in loaded.journals],
        "num_overlaid_records": loaded.num_overlaid,
        "num_lost_records": loaded.num_missing,
        "damage": list(loaded.damage),
    }  # fmt: skip


def _state(loaded: Loaded) -> str:
    writer = writer_of(loaded.paths.lock)
    if writer:
        return f"being written by {writer}"
    finished = loaded.content.attributes.get("finished_at")
    if finished:
        return f"closed at {finished}"
    events = loaded.content.tables.get("events", {})
    if len(events.get("kind", ())):
        last = int(np.argmax(events["event"]))
        # A resume would have written a later event.
        if events["kind"][last] == "failed":
            return f"ended by an exception: {events['message'][last]}"
        if events["kind"][last] == "terminated":
            return "not closed: SIGTERM ended the process"
    return "not closed: the writer ended without close()"


def _provenance(content: Content) -> dict[str, Any]:
    known = {name: content.attributes[name] for name in _PROVENANCE if name in content.attributes}
    return {
        **known,
        "packages": json.loads(content.attributes.get("packages_json", "{}")),
        "config": json.loads(content.attributes.get("config_json", "{}")),
    }


def _steps(content: Content) -> dict[str, Any]:
    steps = content.tables.get("train", {}).get("step", np.empty(0, dtype=np.int64))
    if len(steps) == 0:
        return {"num": 0, "first": None, "last": None, "gaps": []}
    strides = np.diff(steps)
    usual = int(np.median(strides)) if len(strides) else 1
    gaps = [[int(steps[at]), int(steps[at + 1])] for at in np.flatnonzero(strides > usual)]
    return {"num": len(steps), "first": int(steps[0]), "last": int(steps[-1]), "gaps": gaps}


def _counts(tables: Batch, table: str, column: str) -> dict[str, int]:
    return dict(Counter(tables.get(table, {}).get(column, np.empty(0, dtype=object)).tolist()))


def _segments(content: Content) -> list[dict[str, Any]]:
    columns = content.tables.get("segments", {})
    names = ("segment", "start_step", "end_step", "resumed_from_step", "world_size", "created_at", "git_hash")
    num = len(columns.get("segment", ()))
    values = [columns[name].tolist() if name in columns else [None] * num for name in names]
    return [
        {name: None if value == -1 else value for name, value in zip(names, row, strict=True)}
        for row in zip(*values, strict=True)
    ]


def _stored_bytes(loaded: Loaded) -> Counter[str]:
    """Returns how many bytes of the run file the variables of each group take, compressed."""
    sizes: Counter[str] = Counter()
    if loaded.paths.file.exists():
        with open_unlocked(loaded.paths.file) as file:
            for name, group in file.items():
                if name in {table.group for table in TABLES.values()}:
                    sizes[name] = sum(dataset.id.get_storage_size() for dataset in group.values())
    return sizes


def _groups(tables: Batch, layout: Layout, stored: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name, columns in tables.items():
        table = TABLES[name]
        empty: dict[str, Any] = {"rows": {}, "num_bytes": stored[table.group], "variables": {}}
        group = groups.setdefault(table.group, empty)
        group["rows"][table.dim] = num_rows(columns, name)
        for label, column in columns.items():
            variable = layout.variable(name, label)
            if variable is not None:
                fraction = float(np.mean(_is_missing(column))) if column.size else 1.0
                group["variables"][label] = {"dims": list(variable.dims), "missing": round(fraction, 4)}
    return groups


def _is_missing(column: np.ndarray) -> np.ndarray:
    if column.dtype == object:
        return np.array([value == "" for value in column.ravel()])
    return np.isnan(column) if column.dtype.kind == "f" else column == -1


def _files(loaded: Loaded) -> dict[str, int]:
    paths = [loaded.paths.file, loaded.paths.metrics]
    sizes = {path.name: path.stat().st_size for path in paths if path.exists()}
    return {**sizes, **{journal.name: journal.num_bytes for journal in loaded.journals}}


def _journal(journal: Journal) -> dict[str, Any]:
    return {
        "name": journal.name,
        "num_bytes": journal.num_bytes,
        "num_records": len(journal.rows),
        "has_header": bool(journal.layouts),
        "damage": [
            {"offset": each.offset, "num_bytes": each.num_bytes, "what": where(each)}
            for each in journal.damages
        ],
    }
