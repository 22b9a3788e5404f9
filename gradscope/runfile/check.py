"""Checks what a run file holds against the schema: the one place where its datasets are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gradscope.errors import RunFileError
from gradscope.schema import SCHEMA_VERSION, Variable

_KINDS = {"f": "fiu", "i": "iu"}
"""Kind of a schema's dtype to the kinds of numbers that stand for it."""
_VERSION = re.compile(r"(\d+)(?:\.(\d+))?(?:\.\d+)*")
_ADVICE = "Was it changed after it was written? Take an unchanged copy of the file."


def unreadable(path: str | Path, error: OSError) -> RunFileError:
    """Returns what to say of a file or folder that the system does not let us read."""
    where = error.filename or path
    if isinstance(error, IsADirectoryError):
        return RunFileError(
            f"{where}: is a directory; expected a file that RunWriter wrote. Move the directory away."
        )
    return RunFileError(
        f"{where}: cannot be read ({error.strerror or error}). Expected files and folders that this user may "
        "read. Change their permissions, or read a copy."
    )


def check_version(path: Path, attributes: Mapping[str, Any]) -> None:
    """Refuses files that are not ours or of another major version.

    Raises:
        RunFileError: The attribute schema_version is absent, no version, too old or too new.
    """
    version = version_of(path, attributes)
    major, own_major = (int(text.partition(".")[0]) for text in (version, SCHEMA_VERSION))
    if major > own_major:
        raise RunFileError(
            f"{path}: written in schema {version}, this version reads {own_major}.x. "
            "Install a newer gradscope."
        )
    if major < own_major:
        raise RunFileError(
            f"{path}: written in schema {version}, this version reads {own_major}.x. "
            f"Run 'gradscope migrate {path}'."
        )


def version_of(path: Path, attributes: Mapping[str, Any]) -> str:
    """Returns the schema version of a file.

    Raises:
        RunFileError: The attribute schema_version is absent or no version.
    """
    version = _VERSION.fullmatch(str(attributes.get("schema_version", "")))
    if version is None:
        raise RunFileError(
            f"{path}: an HDF5 file without the attribute schema_version, so not a run file. "
            "Expected one that RunWriter wrote."
        )
    return version.group()


def is_newer(version: str) -> bool:
    """Returns whether a version that `check_version` let pass has a higher minor number than ours."""
    found, own = (_VERSION.fullmatch(text) for text in (version, SCHEMA_VERSION))
    assert found is not None
    assert own is not None
    return int(found.group(1)) == int(own.group(1)) and int(found.group(2) or 0) > int(own.group(2))


def read_group(parent: h5py.Group, name: str) -> h5py.Group | None:
    """Returns a group, None where it is absent.

    Raises:
        RunFileError: Something else has its name.
    """
    found = parent.get(name)
    if found is None or isinstance(found, h5py.Group):
        return found
    raise RunFileError(
        f"{parent.file.filename}: '{_place(parent, name)}' is a dataset, expected a group. {_ADVICE}"
    )


def read_dataset(group: h5py.Group, variable: Variable, shape: Sequence[int | None]) -> np.ndarray:
    """Returns the values of one variable of the schema; texts as objects.

    Args:
        group: Where it stands.
        variable: What the schema says of it.
        shape: Its length along each of its dims, None where any will do.

    Raises:
        RunFileError: It is absent, of another shape or type than the schema says, or damaged.
    """
    dataset = checked_dataset(group, variable, shape)
    try:
        return dataset.asstr()[...] if variable.dtype == "str" else dataset[...]
    except (OSError, RuntimeError, ValueError) as error:
        raise _misfit(group, variable, shape, f"cannot be read ({' '.join(str(error).split())})") from error


def checked_dataset(group: h5py.Group, variable: Variable, shape: Sequence[int | None]) -> h5py.Dataset:
    """Returns the dataset of one variable of the schema, unread; arguments as for `read_dataset`.

    Raises:
        RunFileError: It is absent, or of another shape or type than the schema says.
    """
    dataset = group.get(variable.name)
    if not isinstance(dataset, h5py.Dataset):
        raise _misfit(group, variable, shape, f"is {'absent' if dataset is None else 'a group'}")
    if not _fits(dataset.shape, shape) or not _is_of(dataset.dtype, variable.dtype):
        found = f"has shape {dataset.shape} and dtype {_name(dataset.dtype)}"
        raise _misfit(group, variable, shape, found)
    return dataset


def _misfit(group: h5py.Group, variable: Variable, shape: Sequence[int | None], found: str) -> RunFileError:
    lengths = ", ".join(
        dim if length is None else f"{dim}: {length}"
        for dim, length in zip(variable.dims, shape, strict=True)
    )
    kind = "texts" if variable.dtype == "str" else variable.dtype
    return RunFileError(
        f"{group.file.filename}: variable '{_place(group, variable.name)}' {found}, expected {kind} on "
        f"({lengths}). {_ADVICE}"
    )


def check_names(file: h5py.File, name: str, found: Sequence[str], known: Sequence[str], of: str) -> None:
    """Refuses texts of a root variable that are no label.

    Raises:
        RunFileError: One is not among the `known` labels of the dim or variable `of`.
    """
    for text in found:
        if text not in known:
            raise RunFileError(
                f"{file.filename}: variable '/{name}' has '{text}', expected names in '/{of}': "
                f"{', '.join(known)}. {_ADVICE}"
            )


def check_distinct(file: h5py.File, name: str, labels: Sequence[str]) -> None:
    """Refuses labels that stand twice along one dim.

    Raises:
        RunFileError: One does.
    """
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise RunFileError(
            f"{file.filename}: variable '/{name}' has '{twice[0]}' twice, expected names that differ. "
            f"{_ADVICE}"
        )


def _place(group: h5py.Group, name: str) -> str:
    return f"{str(group.name).rstrip('/')}/{name}"


def _fits(found: tuple[int, ...] | None, shape: Sequence[int | None]) -> bool:
    if found is None or len(found) != len(shape):
        return False
    return all(own is None or own == length for own, length in zip(shape, found, strict=True))


def _is_of(found: np.dtype, dtype: str) -> bool:
    is_text = h5py.check_string_dtype(found) is not None
    return is_text if dtype == "str" else not is_text and found.kind in _KINDS[dtype[0]]


def _name(found: np.dtype) -> str:
    return "str" if h5py.check_string_dtype(found) is not None else str(found)
