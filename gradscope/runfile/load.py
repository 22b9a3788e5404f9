"""Reads a run whole: the journals first, then the run file, and what of them is damaged.

That order makes reading safe while a writer works: a journal is deleted only after the run file holds its
rows, so whatever has gone from the journals is in the file that is opened afterwards.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from gradscope.errors import RunFileError
from gradscope.runfile import batch, frames, reading
from gradscope.runfile.check import check_version, is_newer, read_group, unreadable
from gradscope.runfile.content import Content, Superseded, spanned
from gradscope.runfile.damage import of_journals, usable
from gradscope.runfile.deferring import with_tails, without_lazy
from gradscope.runfile.journals import Journal, journals_of_run, scan_files
from gradscope.runfile.layout import Layout
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.reading import Deferred, Lazy, nothing
from gradscope.schema import SCHEMA_VERSION, SUPERSEDED


@dataclass(frozen=True)
class Loaded:
    """A run and the state of its files.

    Attributes:
        content: The run.
        paths: Where it lies.
        journals: The journals, oldest first.
        num_overlaid: Journal records that the run file does not have yet.
        num_missing: Records that were numbered but are nowhere, lost to damage or to a full disk.
        damage: What is lost or cannot be used, a sentence each.
        deferred: Columns that were left on the disk.
    """

    content: Content
    paths: RunPaths
    journals: tuple[Journal, ...]
    num_overlaid: int
    num_missing: int
    damage: tuple[str, ...]
    deferred: tuple[Deferred, ...]


@dataclass(frozen=True)
class Stored:
    """A run file without its journals: what was read of it, and what was not."""

    content: Content
    deferred: Sequence[Deferred]


@dataclass(frozen=True)
class Pending:
    """Rows that are in journals only.

    Attributes:
        batches: The records' rows, oldest first.
        layout: The newest layout among journals and file.
        last_sequence: Number of the last record.
        num_missing: Numbered records before it that are nowhere.
    """

    batches: list[batch.Batch]
    layout: Layout
    last_sequence: int
    num_missing: int


def load(path: str | Path, lazy: Lazy = nothing) -> Loaded:
    """Reads the run in a run directory or run file.

    Args:
        path: The run directory or run file.
        lazy: Says which variables are left on the disk.

    Raises:
        RunFileError: There is no run, the files are not ours, not readable, damaged or of several runs, or
            their format is too new.
    """
    try:
        return _load(path, lazy)
    except RunFileError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def _load(path: str | Path, lazy: Lazy) -> Loaded:
    paths = RunPaths.of(path)
    scans = scan_files(paths)
    stored = read_stored(paths.file, lazy) if paths.file.exists() else None
    run_id = None if stored is None else stored.content.attributes.get("run_id")
    journals = journals_of_run(paths, scans, run_id)
    readable = [journal for journal in journals if journal.layouts]
    if stored is None and not readable:
        raise RunFileError(_nothing_there(path, paths))
    base = empty_content(journals) if stored is None else stored.content
    rows = pending_rows(journals, base)
    # Attributes of a journal older than the file would bring back what a later resume or close has changed.
    own = readable[-1].attributes if readable and (rows.batches or stored is None) else {}
    attributes, damage = usable({**base.attributes, **own})
    _warn_of_newer(path, attributes["schema_version"])
    added, tails = without_lazy(rows.batches, rows.layout, lazy)
    content = base.with_rows(added, rows.layout, {**attributes, "journal_sequence": rows.last_sequence})
    last_told = max((journal.last_told for journal in journals), default=0)
    num_missing = rows.num_missing + max(0, last_told - rows.last_sequence)
    damage += of_journals(paths, journals, num_missing=num_missing, has_file=stored is not None)
    return Loaded(
        spanned(content),
        paths,
        journals,
        len(rows.batches),
        num_missing,
        tuple(damage),
        with_tails(() if stored is None else stored.deferred, tails, base, rows.layout),
    )


def _warn_of_newer(path: str | Path, version: str) -> None:
    if is_newer(version):
        warnings.warn(
            f"{path}: schema {version} is newer than {SCHEMA_VERSION}; what is new in it is ignored.",
            stacklevel=5,
        )


def empty_content(journals: Sequence[Journal]) -> Content:
    """Returns a run without rows, in the newest layout that the journals tell of."""
    readable = [journal for journal in journals if journal.layouts]
    if not readable:
        raise RunFileError(f"{', '.join(journal.name for journal in journals)}: no header is readable.")
    return Content(readable[-1].layouts[-1], {"run_id": readable[-1].attributes["run_id"]})


def pending_rows(journals: Sequence[Journal], base: Content) -> Pending:
    """Returns what the journals hold beyond `base`, each record once, in the order of writing.

    Records of another run count as absent, as do those in a layout that is lost.
    """
    layouts = [base.layout, *(layout for journal in journals for layout in journal.layouts)]
    identities = {layout.identity for layout in layouts}
    done = int(base.attributes.get("journal_sequence", 0))
    run = frames.run_tag(str(base.attributes.get("run_id")))
    payloads = {
        frame.sequence: frame.payload
        for journal in journals
        for frame in journal.rows
        if frame.sequence > done and frame.run == run
    }
    decoded = (_decoded(payloads[n], identities) for n in sorted(payloads))
    batches = [rows for rows in decoded if rows is not None]
    last = max(payloads, default=done)
    return Pending(batches, max(layouts, key=lambda layout: layout.extent), last, last - done - len(batches))


def _decoded(payload: bytes, identities: set[int]) -> batch.Batch | None:
    """Returns a record's rows; None for one in an unknown layout or not written by us."""
    try:
        return batch.decode(payload) if batch.layout_identity(payload) in identities else None
    except (ValueError, KeyError, TypeError, struct.error):
        return None


def read_file(path: Path) -> Content:
    """Reads a run file without its journals; raises as `read_stored` does."""
    return read_stored(path, nothing).content


def read_stored(path: Path, lazy: Lazy) -> Stored:
    """Reads a run file without its journals, and without the variables that are left on the disk.

    Raises:
        RunFileError: The file is not ours, damaged, or its format is too new.
    """
    with _opened(path) as file:
        head = _head(file, path)
        parent = read_group(file, SUPERSEDED)
        groups = {} if parent is None else {name: read_group(parent, name) for name in parent}
        superseded: dict[str, Superseded] = {}
        tables = reading.read_tables(file, head.layout, lazy)
        deferred = reading.deferred_columns(file, head.layout, tables, lazy)
        for name, group in groups.items():
            if group is not None:
                own = reading.read_tables(group, head.layout, lazy)
                superseded[name] = Superseded(own, _attributes(group))
                deferred += reading.deferred_columns(group, head.layout, own, lazy)
        return Stored(Content(head.layout, head.attributes, tables, superseded), deferred)


def read_head(path: Path) -> Content:
    """Reads layout and root attributes of a run file, no rows; raises as `read_file` does."""
    with _opened(path) as file:
        return _head(file, path)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        open(path, "rb").close()  # the system's own words on permissions are plainer than those of HDF5
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        with open_unlocked(path) as file:
            yield file
    except RunFileError:
        raise
    except (OSError, KeyError, RuntimeError) as error:
        raise RunFileError(
            f"{path}: not a readable run file ({' '.join(str(error).split())}). Expected an HDF5 file that "
            "RunWriter wrote, whole. Was the copy cut short? Copy it again, with the journals beside it."
        ) from error


def open_unlocked(path: Path) -> h5py.File:
    """Opens a file that is never written in place, so needs no lock; some network file systems have none."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        # HDF5 refuses this where the process has the file open with locks, as plain xarray opens it.
        if "locking" not in str(error):
            raise
        return h5py.File(path, "r")


def _head(file: h5py.File, path: Path) -> Content:
    attributes = _attributes(file)
    check_version(path, attributes)
    sequence = attributes.get("journal_sequence", 0)
    if not isinstance(sequence, int):
        raise RunFileError(
            f"{path}: attribute 'journal_sequence' is {sequence!r}, expected the number of the last record "
            "in the file. Take an unchanged copy of the file."
        )
    return Content(reading.read_layout(file), attributes)


def _attributes(group: h5py.Group) -> dict[str, Any]:
    return {name: _plain(value) for name, value in group.attrs.items()}


def _plain(value: Any) -> Any:
    """Returns an attribute as Python's own number or text where it is one."""
    single = value.item() if getattr(value, "size", 0) == 1 and hasattr(value, "item") else value
    return single.decode(errors="replace") if isinstance(single, bytes) else single


def _nothing_there(path: str | Path, paths: RunPaths) -> str:
    where = Path(path)
    expected = f"Expected {paths.file.name} or journals {paths.file.name}.wal.* there"
    if journals := ", ".join(journal.name for journal in paths.journals().values()):
        return (
            f"{where}: holds no run: there is no {paths.file.name} and no readable header in {journals}. "
            f"Put the run's {paths.file.name} back beside them."
        )
    if not where.exists():
        return f"{where}: no such file or directory. {expected}; check the path."
    if where.is_dir() and (
        inner := sorted(child.parent.name for child in where.glob(f"*/{paths.file.name}*"))
    ):
        return f"{where}: holds no run itself. {expected}; did you mean {where / inner[0]}?"
    return f"{where}: holds no run. {expected}; a run has them from its first second on."
