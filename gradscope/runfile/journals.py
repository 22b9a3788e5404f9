"""Reads the journals of a run: their whole records, their headers, and what of them is damaged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.errors import RunFileError
from gradscope.runfile import frames
from gradscope.runfile.check import check_version
from gradscope.runfile.layout import Layout
from gradscope.runfile.paths import RunPaths


@dataclass(frozen=True)
class Scan:
    """The whole records of a file, of whatever run, and the stretches between that are none."""

    path: Path
    num_bytes: int
    records: Sequence[frames.Frame]
    damages: Sequence[frames.Damage]


@dataclass(frozen=True)
class Journal:
    """What one journal holds of its run.

    Attributes:
        name: File name.
        num_bytes: Size.
        layouts: What its headers say, oldest first; empty when no header is whole.
        attributes: Root attributes of its last header.
        rows: Its records of rows, in the order of the file.
        damages: Stretches that are no whole record.
        last_told: Number of the last record before its last header, as that says; 0 without a header.
        num_foreign: Whole records among its own that are of another run, or of no kind that is known.
    """

    name: str
    num_bytes: int
    layouts: tuple[Layout, ...]
    attributes: Mapping[str, Any]
    rows: tuple[frames.Frame, ...]
    damages: tuple[frames.Damage, ...]
    last_told: int
    num_foreign: int


def scan_file(path: Path) -> Scan:
    """Reads one journal.

    Raises:
        OSError: It is gone, or not a file that this user may read.
    """
    data = path.read_bytes()
    return Scan(path, len(data), *frames.scan(data))


def scan_files(paths: RunPaths) -> list[Scan]:
    """Reads the journals that are there, oldest first; raises as `scan_file` does."""
    scans = []
    for path in paths.journals().values():
        try:
            scans.append(scan_file(path))
        except FileNotFoundError:
            continue  # compacted since the folder was listed, so the run file has its rows
    return scans


def journals_of_run(paths: RunPaths, scans: Sequence[Scan], run_id: object) -> tuple[Journal, ...]:
    """Returns what journals hold of a run; damage is reported in the result, never raised.

    Args:
        paths: Of the run.
        scans: Its journals.
        run_id: As the run file says; None where there is none. Then most records decide.

    Raises:
        RunFileError: A journal's headers are all of another run, or its format is too new.
    """
    counts = Counter(frame.run for scan in scans for frame in scan.records)
    (most, _), *_ = counts.most_common(1) or [(0, 0)]
    run = most if run_id is None else frames.run_tag(str(run_id))
    journals = tuple(_of_run(scan, run) for scan in scans)
    own = str(run_id) if run_id else next((j.attributes["run_id"] for j in journals if j.layouts), None)
    first = paths.file.name if run_id else next((j.name for j in journals if j.layouts), None)
    for scan, journal in zip(scans, journals, strict=True):
        if not journal.layouts and not journal.rows and (other := _run_id(scan)) and own:
            raise RunFileError(
                f"{paths.directory}: {first} is of run {own}, {journal.name} of run {other}; expected files "
                "of one run. Put each run into a folder of its own."
            )
    return journals


def _of_run(scan: Scan, run: int) -> Journal:
    layouts: list[Layout] = []
    attributes: Mapping[str, Any] = {}
    rows: list[frames.Frame] = []
    last_told = num_foreign = 0
    for frame in scan.records:
        header = _header(frame)
        if frame.run == run and frame.kind == frames.ROWS_KIND:
            rows.append(frame)
        elif frame.run == run and header is not None:
            layout, attributes = header
            last_told = frame.sequence
            check_version(scan.path, attributes)
            layouts.append(layout)
        else:
            num_foreign += 1
    return Journal(
        scan.path.name,
        scan.num_bytes,
        tuple(layouts),
        attributes,
        tuple(rows),
        tuple(scan.damages),
        last_told,
        num_foreign,
    )


def _header(frame: frames.Frame) -> tuple[Layout, dict[str, Any]] | None:
    """Returns what a header says; None for a record that is no header of ours."""
    if frame.kind != frames.HEADER_KIND:
        return None
    try:
        value = json.loads(frame.payload)
        layout, attributes = Layout.from_json(value["layout"]), dict(value["attributes"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (layout, attributes) if frame.run == frames.run_tag(str(attributes.get("run_id"))) else None


def _run_id(scan: Scan) -> str | None:
    """Returns the run of the first header, of whatever run."""
    headers: Iterable[Any] = (_header(frame) for frame in scan.records)
    return next((str(header[1].get("run_id")) for header in headers if header is not None), None)
