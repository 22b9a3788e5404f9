"""Reads the journals of a run: their whole records, their headers, and what of them is damaged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.errors import RunFileError
from gradscope.runfile import frames
from gradscope.runfile.check import check_version
from gradscope.runfile.layout import Layout
from gradscope.runfile.paths import RunPaths


@dataclass(frozen=True)
class Journal:
    """What one journal holds.

    Attributes:
        name: File name.
        num_bytes: Size.
        layouts: What its headers say, oldest first; empty when no header is whole.
        attributes: Root attributes of its last header.
        rows: Its records of rows, in the order of the file.
        damages: Stretches that are no whole record.
        last_told: Number of the last record before its last header, as that says; 0 without a header.
        num_foreign: Whole records among its own that are of another run; they are left out.
    """

    name: str
    num_bytes: int
    layouts: tuple[Layout, ...]
    attributes: Mapping[str, Any]
    rows: tuple[frames.Frame, ...]
    damages: tuple[frames.Damage, ...]
    last_told: int
    num_foreign: int


def read_journal(path: Path) -> Journal:
    """Reads one journal; damage is reported in the result, never raised.

    Raises:
        OSError: It is gone, or not a file that this user may read.
        RunFileError: Its format is too new.
    """
    data = path.read_bytes()
    found, damages = frames.scan(data)
    (run, _), *_ = Counter(frame.run for frame in found).most_common(1) or [(0, 0)]
    layouts: list[Layout] = []
    attributes: dict[str, Any] = {}
    rows: list[frames.Frame] = []
    last_told = 0
    for frame in found:
        if frame.run != run:
            continue
        if frame.kind == frames.ROWS_KIND:
            rows.append(frame)
        elif (header := _header(frame)) is not None:
            layout, attributes = header
            last_told = frame.sequence
            check_version(path, attributes)
            layouts.append(layout)
    return Journal(
        path.name,
        len(data),
        tuple(layouts),
        attributes,
        tuple(rows),
        tuple(damages),
        last_told,
        sum(frame.run != run for frame in found),
    )


def _header(frame: frames.Frame) -> tuple[Layout, dict[str, Any]] | None:
    """Returns what a header says; None for a record that is no header of ours."""
    try:
        value = json.loads(frame.payload)
        layout, attributes = Layout.from_json(value["layout"]), dict(value["attributes"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (layout, attributes) if frame.run == frames.run_tag(str(attributes.get("run_id"))) else None


def read_journals(paths: RunPaths) -> tuple[Journal, ...]:
    """Reads the journals that are there, oldest first; raises as `read_journal` does."""
    journals = []
    for path in paths.journals().values():
        try:
            journals.append(read_journal(path))
        except FileNotFoundError:
            continue  # compacted since the folder was listed, so the run file has its rows
    return tuple(journals)


def check_same_run(paths: RunPaths, journals: Sequence[Journal], attributes: Mapping[str, Any]) -> None:
    """Refuses journals that another run left beside a run file.

    Args:
        paths: Of the run.
        journals: Those beside it; one without a run_id belongs to any run.
        attributes: Root attributes of the run file; empty when there is none.

    Raises:
        RunFileError: Their run_ids differ.
    """
    first, first_id = paths.file.name, attributes.get("run_id")
    for journal in journals:
        own = journal.attributes.get("run_id")
        if first_id and own and own != first_id:
            raise RunFileError(
                f"{paths.directory}: {first} is of run {first_id}, {journal.name} of run {own}; expected "
                f"files of one run. Put each run into a folder of its own."
            )
        if own and not first_id:
            first, first_id = journal.name, own
