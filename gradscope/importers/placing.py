"""Where an imported run goes: nothing there is replaced, and it comes there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradscope.errors import RunFileError
from gradscope.runfile.paths import RunPaths


def refuse_existing(out: Path) -> None:
    """Refuses a place at which a file stands that the run would write.

    Raises:
        RunFileError: One does, or `out` is a file and no run file.
    """
    paths = RunPaths.of(out)
    if paths.exists():
        raise RunFileError(
            f"{paths.directory}: holds a run already ({paths.file.name}). Write to another path with -o."
        )
    if paths.metrics.exists():
        raise RunFileError(
            f"{paths.metrics}: is there already, and the import would write a file of that name. Write to "
            "another path with -o."
        )
    if out.is_file() or paths.directory.is_file():
        raise RunFileError(f"{out}: a file is there already. Write to another path with -o.")


@contextmanager
def placed_whole(out: Path) -> Iterator[Path]:
    """Yields a path to write the run to, which is moved to `out` when all went well and else removed.

    Raises:
        RunFileError: It cannot be written there, or a file has turned up at `out` meanwhile.
    """
    paths = RunPaths.of(out)
    near = next(folder for folder in paths.directory.absolute().parents if folder.is_dir())
    if paths.directory.is_dir():
        near = paths.directory
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{paths.file.name}.", suffix=".import", dir=near))
    except OSError as error:
        raise RunFileError(
            f"{paths.directory}: a run cannot be written there ({error}). Choose another folder."
        ) from error
    try:
        yield folder / paths.file.name
        refuse_existing(out)
        try:
            paths.directory.mkdir(parents=True, exist_ok=True)
            # The run file last: without it there is no run.
            for file in sorted(folder.iterdir(), key=lambda file: file.name == paths.file.name):
                os.replace(file, paths.directory / file.name)
        except OSError as error:
            raise RunFileError(
                f"{paths.directory}: a run cannot be written there ({error}). Choose another folder."
            ) from error
    finally:
        shutil.rmtree(folder)
