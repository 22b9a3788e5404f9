"""Writes what can be saved of a damaged run, or of anybody's HDF5 file, into a new file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradscope.errors import RunFileError
from gradscope.runfile import store
from gradscope.runfile.batch import Batch, num_rows, select
from gradscope.runfile.content import Content, Superseded, spanned
from gradscope.runfile.damage import num_records, of_journals
from gradscope.runfile.durable import remove, write_whole
from gradscope.runfile.journals import Journal, journals_of_run, scan_files
from gradscope.runfile.load import empty_content, pending_rows, read_file
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.salvaging import Salvaged, salvage_in_child
from gradscope.schema import DAMAGE, SCHEMA_VERSION, TABLES


@dataclass(frozen=True)
class Repair:
    """What was done.

    Attributes:
        target: The new file.
        is_run: Whether it is a run that `open_run` opens.
        saved: What is in it, a sentence each.
        lost: What is not, a sentence each.
    """

    target: Path
    is_run: bool
    saved: tuple[str, ...]
    lost: tuple[str, ...]


def repair(path: str | Path, target: Path | None = None) -> Repair:
    """Saves what can be saved; what is there stays as it is.

    Args:
        path: A run directory, a run file, or any HDF5 file.
        target: The new file; by default `NAME.repaired.h5` beside the old one.

    Raises:
        RunFileError: There is nothing, nothing can be saved, or the new file is there already.
    """
    paths = RunPaths.of(path) if Path(path).is_dir() else RunPaths(Path(path))
    target = target or paths.file.with_name(f"{paths.file.stem}.repaired.h5")
    if target.exists():
        raise RunFileError(f"{target}: is there already. Move it away, or name another file with -o.")
    if not paths.exists():
        raise RunFileError(f"{path}: there is neither {paths.file.name} nor a journal of it. Check the path.")
    scratch = paths.temporary()
    try:
        found = Salvaged(0, ())
        if paths.file.exists():
            found = salvage_in_child(paths.file, scratch)
        return _written(path, paths, target, scratch, found)
    finally:
        remove(scratch)


def _written(path: str | Path, paths: RunPaths, target: Path, scratch: Path, found: Salvaged) -> Repair:
    """Writes the new file from what was salvaged and from the journals."""
    lost = list(found.lost)
    run = _with_journals(paths, _as_run(scratch, lost))
    if run is not None:
        content, saved, missing = run
        write_whole(target, store.image(content, name=str(target)))
        return Repair(target, True, tuple(saved), (*lost, *missing))
    if not scratch.exists():
        raise RunFileError(f"{path}: nothing can be saved: {'; '.join(lost) or 'no record is readable'}.")
    write_whole(target, scratch.read_bytes())
    return Repair(target, False, (f"{found.num_whole} datasets whole",), tuple(lost))


def _as_run(scratch: Path, lost: list[str]) -> Content | None:
    """Returns what was salvaged as a run, without rows that lost their number; None where it is none."""
    if not scratch.exists():
        return None
    try:
        content = read_file(scratch)
    except RunFileError as error:
        lost.append(f"the form of a run ({str(error).removeprefix(f'{scratch}: ')})")
        return None
    superseded = {
        name: Superseded(_numbered(group.tables, lost), group.attributes)
        for name, group in content.superseded.items()
    }
    return replace(content, tables=_numbered(content.tables, lost), superseded=superseded)


def _numbered(tables: Batch, lost: list[str]) -> Batch:
    """Leaves out rows whose coordinate is lost, without which nothing of them can be placed."""
    kept = {}
    for name, columns in tables.items():
        whole = columns[TABLES[name].dim] >= 0
        if not whole.all():
            lost.append(f"/{TABLES[name].group}: {int((~whole).sum())} rows without their {TABLES[name].dim}")
        kept[name] = select(columns, whole)
    return kept


def _with_journals(paths: RunPaths, stored: Content | None) -> tuple[Content, list[str], list[str]] | None:
    """Returns the run with its journals, what is saved and what is lost; None where there is no run."""
    scans = scan_files(paths)
    journals = journals_of_run(paths, scans, None if stored is None else stored.attributes.get("run_id"))
    if stored is None and not any(journal.layouts for journal in journals):
        return None
    base = empty_content(journals) if stored is None else stored
    rows = pending_rows(journals, base)
    attributes = {**_attributes(journals), **base.attributes, "journal_sequence": rows.last_sequence}
    attributes = {"schema_version": SCHEMA_VERSION, **attributes}
    attributes.pop(DAMAGE, None)
    content = spanned(base.with_rows(rows.batches, rows.layout, attributes))
    saved = [
        f"{num_rows(columns, name)} rows of /{TABLES[name].group}" for name, columns in content.tables.items()
    ]
    saved.append(f"of these from journals: {num_records(len(rows.batches))}")
    lost = list(of_journals(paths, journals, num_missing=rows.num_missing, has_file=stored is not None))
    return content, saved, lost


def _attributes(journals: Sequence[Journal]) -> dict[str, Any]:
    return {name: value for journal in journals for name, value in journal.attributes.items()}
