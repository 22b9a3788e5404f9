"""TensorBoard event files: one, or a folder of those of one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.log import ForeignLog, Row, Settings, existing, refuse_options
from gradscope.importers.wording import listed, plain

MARK = "tfevents"
SCALARS = "scalars"
"""Plugin of TensorBoard's that draws scalars."""
FRAME = 16
"""Bytes around each record: its length, and checksums of both."""
NOTES = ("TensorBoard keeps 32-bit floats: values agree with what was logged to about 7 digits.",)


class Importer:
    """TensorBoard event files, one or a folder of those of one run; every scalar, no sampling."""

    def recognises(self, source: str) -> bool:
        """Returns whether it is an event file, or a folder that holds some."""
        path = Path(source)
        return MARK in path.name if path.is_file() else path.is_dir() and bool(_files(path))

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the scalars; those that follow one another at one step are one row.

        Raises:
            DataError: There are no event files, they hold no scalars, or they are of several runs.
        """
        path = existing(source, "an event file or a folder of them")
        refuse_options(source, "event files", settings, "step", "where")
        files = [path] if path.is_file() else _files(path)
        chosen = [file for file in files if file.parent == path] or files
        folders = sorted({str(file.parent.relative_to(path)) for file in files} if path.is_dir() else ())
        if len({file.parent for file in chosen}) > 1:
            raise DataError(
                f"{path}: holds event files of {len(folders)} runs ({listed(folders)}). Name one of the "
                "folders; parts of one run that was resumed may be named one after the other."
            )
        if not files:
            raise DataError(f"{path}: holds no event file (a name with '{MARK}').")
        rows = tuple(row for file in chosen for row in _rows(file))
        damage = [sentence for file in chosen if (sentence := _damage(file))]
        if not rows:
            raise DataError(
                f"{path}: no scalars in {len(chosen)} event file(s), there is nothing to import."
                f"{' '.join(['', *damage])}"
            )
        _need_steps(path, rows)
        return ForeignLog(rows, notes=(*NOTES, *damage, *_beside(len(files) - len(chosen), folders)))


def _need_steps(path: Path, rows: Sequence[Row]) -> None:
    """Refuses values that were all written without a step, which TensorBoard counts as step 0."""
    keys = [key for row in rows for key in row.values]
    if all(row.counter == 0 for row in rows) and len(set(keys)) < len(keys):
        raise DataError(
            f"{path}: all {len(keys)} values stand at step 0, so they were written without a step. Give "
            "add_scalar a global_step."
        )


def _beside(num_files: int, folders: Sequence[str]) -> tuple[str, ...]:
    """Says which folders are left out, as those that add_hparams and add_scalars make."""
    if not num_files:
        return ()
    others = listed(folder for folder in folders if folder != ".")
    return (f"{num_files} event file(s) in folders below are left out ({others}); name one to import it.",)


def _damage(file: Path) -> str:
    """Returns what to say of a file whose records end before it does: the library reads no further."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    end = sum(len(record) + FRAME for record in RawEventFileLoader(str(file)).Load())
    size = file.stat().st_size
    if end == size:
        return ""
    return (
        f"{plain(file.name)} is damaged or cut off at byte {end} of {size}: what was logged after that is "
        "lost."
    )


def _files(folder: Path) -> list[Path]:
    """Returns the event files under a folder; their names begin with the time of their start."""
    return sorted(file for file in folder.rglob(f"*{MARK}*") if file.is_file())


def _rows(file: Path) -> Iterator[Row]:
    values: dict[str, float] = {}
    step, time = 0, math.nan
    for event_step, event_time, tag, value in _scalars(file):
        if values and (event_step != step or tag in values):
            yield Row(step, values, time)
            values = {}
        values[tag] = value
        step, time = event_step, event_time
    if values:
        yield Row(step, values, time)


def _scalars(file: Path) -> Iterator[tuple[int, float, str, float]]:
    """Yields (step, wall time, tag, value) of every scalar, in the order of writing.

    Raises:
        DataError: The file is no event file, or damaged before its end.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    kinds: dict[str, str] = {}
    try:
        for record in RawEventFileLoader(str(file)).Load():
            event = event_pb2.Event.FromString(record)
            for value in event.summary.value:
                # What plugin a tag is of stands in its first value only.
                kind = kinds.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                number = _number(value, kind)
                if number is not None:
                    yield event.step, event.wall_time, value.tag, number
    except (OSError, DecodeError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as an event file ({error}).") from error


def _number(value: Any, kind: str) -> float | None:
    """Returns the number in a summary value, as writers of either generation put it there; else None."""
    from tensorboard.util import tensor_util

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if kind == SCALARS and value.HasField("tensor"):
        return float(tensor_util.make_ndarray(value.tensor).reshape(-1)[0])
    return None
