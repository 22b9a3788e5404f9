"""Brings run files of older schema versions to the present one.

`MIGRATIONS` maps a version to the step that leads away from it; schema 1.0 is the first, so it is empty. A
step changes an open copy of the file; the version attribute is set for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py

from gradscope.errors import RunFileError
from gradscope.runfile import durable
from gradscope.runfile.check import version_of
from gradscope.runfile.durable import write_whole
from gradscope.runfile.load import load, open_unlocked, read_file
from gradscope.runfile.lock import WriterLock
from gradscope.runfile.paths import RunPaths
from gradscope.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class Migration:
    """One step.

    Attributes:
        target: Version that it leads to.
        change: Changes a file of the older version, open for writing.
    """

    target: str
    change: Callable[[h5py.File], None]


MIGRATIONS: dict[str, Migration] = {}


def steps_from(version: str) -> Iterator[Migration]:
    """Yields the steps from a version to the present one.

    Raises:
        RunFileError: There is a gap.
    """
    while version != SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise RunFileError(
                f"no migration leads away from schema {version}. Known: {', '.join(MIGRATIONS) or 'none'}. "
                "Install the gradscope that wrote the run, or a newer one."
            )
        yield MIGRATIONS[version]
        version = MIGRATIONS[version].target


def migrate(path: str | Path) -> tuple[str, Path | None]:
    """Brings a run to the present schema version; the old file stays beside it.

    Args:
        path: Run directory or run file.

    Returns:
        The version that the run had, and where its old file is now; None where nothing had to be done.

    Raises:
        RunFileError: There is no run file, a writer is at work, journals would be left behind, or no
            migration is known.
    """
    paths = RunPaths.of(path)
    if not paths.file.exists():
        load(path)  # refuses what is no run at all
        return SCHEMA_VERSION, None
    lock = WriterLock(paths.lock)
    try:
        with open_unlocked(paths.file) as file:
            version = version_of(paths.file, dict(file.attrs))
        if version == SCHEMA_VERSION:
            return version, None
        steps = list(steps_from(version))
        if paths.journals():
            raise RunFileError(
                f"{paths.directory}: has journals of schema {version} beside {paths.file.name}. "
                "Resume and close the run with the gradscope that wrote it, then migrate."
            )
        return version, _migrated(paths, version, steps)
    finally:
        lock.release()


def _migrated(paths: RunPaths, version: str, steps: list[Migration]) -> Path:
    target = paths.temporary()
    kept = paths.file.with_name(f"{paths.file.name}.schema-{version}")
    data = paths.file.read_bytes()
    try:
        write_whole(target, data)
        with h5py.File(target, "r+") as file:
            for step in steps:
                step.change(file)
                file.attrs["schema_version"] = step.target
        read_file(target)
        durable.sync(target)
        write_whole(kept, data)
        durable.rename(target, paths.file)
        durable.sync(paths.directory)
    except BaseException:
        durable.remove(target)
        raise
    return kept
