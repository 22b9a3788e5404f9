"""Reads the journals of a run: their whole records, their headers, and what of them is damaged."""

from __future__ import annotations

import json
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
        rows: Record number to payload.
        damages: Stretches that are no whole record.
        last_told: Number of the last record before its last header, as that says; 0 without a header.
    """

    name: str
    num_bytes: int
    layouts: tuple[Layout, ...]
    attributes: Mapping[str, Any]
    rows: Mapping[int, bytes]
    damages: tuple[frames.Damage, ...]
    last_told: int


def read_journal(path: Path) -> Journal:
    """Reads one journal; damage is reported in the result, never raised.

    Raises:
        OSError: It is gone, or not a file that this user may read.
        RunFileError: Its format is too new.
    """
    data = path.read_bytes()
    found, damages = frames.scan(data)
    layouts: list[Layout] = []
    attributes: dict[str, Any] = {}
    last_told = 0
    for frame in found:
        if frame.kind == frames.HEADER_KIND:
            header = json.loads(frame.payload)
            attributes, last_told = header["attributes"], frame.sequence
            check_version(path, attributes)
            layouts.append(Layout.from_json(header["layout"]))
    rows = {frame.sequence: frame.payload for frame in found if frame.kind == frames.ROWS_KIND}
    return Journal(path.name, len(data), tuple(layouts), attributes, rows, tuple(damages), last_told)


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
