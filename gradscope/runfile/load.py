"""Reads a run whole: the journals first, then the run file, and what of them is damaged.

That order makes reading safe while a writer works: a journal is deleted only after the run file holds its
rows, so whatever has gone from the journals is in the file that is opened afterwards.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from gradscope.errors import RunFileError
from gradscope.runfile import batch, frames, store
from gradscope.runfile.content import Content, Superseded, spanned
from gradscope.runfile.layout import Layout
from gradscope.runfile.paths import RunPaths
from gradscope.schema import SCHEMA_VERSION, SUPERSEDED


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
    """

    name: str
    num_bytes: int
    layouts: tuple[Layout, ...]
    attributes: Mapping[str, Any]
    rows: Mapping[int, bytes]
    damages: tuple[frames.Damage, ...]


@dataclass(frozen=True)
class Loaded:
    """A run and the state of its files.

    Attributes:
        content: The run.
        paths: Where it lies.
        journals: The journals, oldest first.
        num_overlaid: Journal records that the run file does not have yet.
        num_missing: Records that were numbered but are nowhere, lost to damage or to a full disk.
    """

    content: Content
    paths: RunPaths
    journals: tuple[Journal, ...]
    num_overlaid: int
    num_missing: int


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


def load(path: str | Path) -> Loaded:
    """Reads the run in a run directory or run file.

    Raises:
        RunFileError: There is no run, the file is not ours or damaged, or its format is too new.
    """
    paths = RunPaths.of(path)
    journals = tuple(_read_journals(paths))
    stored = read_file(paths.file) if paths.file.exists() else None
    readable = [journal for journal in journals if journal.layouts]
    if stored is None and not readable:
        raise RunFileError(_nothing_there(path, paths))
    base = stored or empty_content(journals)
    rows = pending_rows(journals, base)
    # Attributes of a journal older than the file would bring back what a later resume or close has changed.
    attributes = readable[-1].attributes if readable and (rows.batches or stored is None) else {}
    sequence = {"journal_sequence": rows.last_sequence}
    content = base.with_rows(rows.batches, rows.layout, {**attributes, **sequence})
    return Loaded(spanned(content), paths, journals, len(rows.batches), rows.num_missing)


def empty_content(journals: Sequence[Journal]) -> Content:
    """Returns a run without rows, in the newest layout that the journals tell of."""
    layouts = [layout for journal in journals for layout in journal.layouts]
    if not layouts:
        raise RunFileError(f"{', '.join(journal.name for journal in journals)}: no header is readable.")
    return Content(layouts[-1], {})


def pending_rows(journals: Sequence[Journal], base: Content) -> Pending:
    """Returns what the journals hold beyond `base`, each record once, in the order of writing."""
    layouts = [base.layout, *(layout for journal in journals for layout in journal.layouts)]
    identities = {layout.identity for layout in layouts}
    done = int(base.attributes.get("journal_sequence", 0))
    payloads = {n: payload for journal in journals for n, payload in journal.rows.items() if n > done}
    known = [n for n in sorted(payloads) if batch.layout_identity(payloads[n]) in identities]
    last = max(payloads, default=done)
    return Pending(
        [batch.decode(payloads[n]) for n in known],
        max(layouts, key=lambda layout: layout.extent),
        last,
        last - done - len(known),
    )


def read_file(path: Path) -> Content:
    """Reads a run file without its journals.

    Raises:
        RunFileError: The file is not ours, damaged, or its format is too new.
    """
    with _opened(path) as file:
        head = _head(file, path)
        superseded = {
            name: Superseded(store.read_tables(group, head.layout), _attributes(group))
            for name, group in file.get(SUPERSEDED, {}).items()
        }
        return Content(head.layout, head.attributes, store.read_tables(file, head.layout), superseded)


def read_head(path: Path) -> Content:
    """Reads layout and root attributes of a run file, no rows; raises as `read_file` does."""
    with _opened(path) as file:
        return _head(file, path)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        # Never written in place, so no lock is needed, and some network file systems have none.
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except RunFileError:
        raise
    except (OSError, KeyError, RuntimeError) as error:
        raise RunFileError(
            f"{path}: not a readable run file ({error}). Expected an HDF5 file that RunWriter wrote, whole. "
            "Was the copy cut short? Copy it again, with the journals beside it."
        ) from error


def _head(file: h5py.File, path: Path) -> Content:
    attributes = _attributes(file)
    _check_version(path, attributes)
    return Content(store.read_layout(file), attributes)


def _attributes(group: h5py.Group) -> dict[str, Any]:
    return {name: value.item() if hasattr(value, "item") else value for name, value in group.attrs.items()}


def read_journal(path: Path) -> Journal:
    """Reads one journal; damage is reported in the result, never raised.

    Raises:
        FileNotFoundError: It is gone.
        RunFileError: Its format is too new.
    """
    data = path.read_bytes()
    found, damages = frames.scan(data)
    layouts: list[Layout] = []
    attributes: dict[str, Any] = {}
    for frame in found:
        if frame.kind == frames.HEADER_KIND:
            header = json.loads(frame.payload)
            attributes = header["attributes"]
            _check_version(path, attributes)
            layouts.append(Layout.from_json(header["layout"]))
    rows = {frame.sequence: frame.payload for frame in found if frame.kind == frames.ROWS_KIND}
    return Journal(path.name, len(data), tuple(layouts), attributes, rows, tuple(damages))


def _read_journals(paths: RunPaths) -> list[Journal]:
    journals = []
    for path in paths.journals().values():
        try:
            journals.append(read_journal(path))
        except FileNotFoundError:
            continue  # compacted since the folder was listed, so the run file has its rows
    return journals


def _check_version(path: Path, attributes: Mapping[str, Any]) -> None:
    found = attributes.get("schema_version")
    if not isinstance(found, str) or not found.replace(".", "").isdigit():
        raise RunFileError(
            f"{path}: an HDF5 file without the attribute schema_version, so not a run file. "
            "Expected one that RunWriter wrote."
        )
    major, _, minor = found.partition(".")
    own_major, _, own_minor = SCHEMA_VERSION.partition(".")
    if int(major) > int(own_major):
        raise RunFileError(
            f"{path}: written in schema {found}, this version reads {own_major}.x. Install a newer gradscope."
        )
    if int(minor or 0) > int(own_minor):
        warnings.warn(
            f"{path}: schema {found} is newer than {SCHEMA_VERSION}; what is new in it is ignored.",
            stacklevel=4,
        )


def _nothing_there(path: str | Path, paths: RunPaths) -> str:
    where = Path(path)
    expected = f"Expected {paths.file.name} or journals {paths.file.name}.wal.* there"
    if not where.exists():
        return f"{where}: no such file or directory. {expected}; check the path."
    if where.is_dir() and (
        inner := sorted(child.parent.name for child in where.glob(f"*/{paths.file.name}*"))
    ):
        return f"{where}: holds no run itself. {expected}; did you mean {where / inner[0]}?"
    return f"{where}: holds no run. {expected}; a run has them from its first second on."
