"""Copies what can be read of a damaged HDF5 file, of whatever origin, and says what cannot.

Damage can make HDF5 crash or never return, so this runs in a process of its own, see `salvaging`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gradscope.runfile.superblock import opened_up

_OF_SCALES = ("DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "_Netcdf4Dimid", "_Netcdf4Coordinates")
_FAILURES = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""What h5py raises on damage, according to where it is met."""


@dataclass
class Salvage:
    """What became of a file.

    Attributes:
        num_bytes: Length of the damaged file; what should lie beyond is lost.
        skip: Objects that are not even looked at.
        say: Is told of each object before it is looked at, and of each piece that was read.
        num_whole: Datasets that were read whole.
        lost: What was not, a sentence each.
    """

    num_bytes: int
    skip: Collection[str]
    say: Callable[[str], None]
    num_whole: int = 0
    lost: list[str] = field(default_factory=list)


def salvage(source: Path, target: Path, skip: Collection[str], say: Callable[[str], None]) -> Salvage:
    """Writes a copy of what is readable; there is no file `target` when nothing is.

    Args:
        source: The damaged file.
        target: The copy.
        skip: Objects that are not even looked at.
        say: See `Salvage`.
    """
    data = source.read_bytes()
    result = Salvage(len(data), skip, say)
    say("/")
    try:
        file = _open_image(opened_up(data)[0], f"{target}.image")
    except _FAILURES as error:
        result.lost.append(f"the whole file ({_words(error)})")
        return result
    with file, h5py.File(target, "w", driver="core", backing_store=False) as copy:
        _copy_group(file, copy, result)
        _attach_scales(file, copy, result)
        copy.flush()
        if len(copy) or len(copy.attrs):
            target.write_bytes(copy.id.get_file_image())
    return result


def _open_image(data: bytes, name: str) -> h5py.File:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(65_536, backing_store=False)
    access.set_file_image(data)
    return h5py.File(h5py.h5f.open(name.encode(), h5py.h5f.ACC_RDONLY, access))


def _copy_group(source: h5py.Group, copy: h5py.Group, result: Salvage) -> None:
    _copy_attributes(source, copy, result)
    for name in _names(source, result):
        place = f"{source.name.rstrip('/')}/{name}"
        if place in result.skip:
            continue
        result.say(place)
        try:
            node = source[name]
            if isinstance(node, h5py.Group):
                _copy_group(node, copy.create_group(name), result)
            elif isinstance(node, h5py.Dataset):
                _copy_dataset(node, copy, name, result)
        except _FAILURES as error:
            result.lost.append(f"{place} ({_words(error)})")


def _names(group: h5py.Group, result: Salvage) -> list[str]:
    try:
        return list(group)
    except _FAILURES as error:
        result.lost.append(f"what {group.name} holds ({_words(error)})")
        return []


def _copy_attributes(source: Any, copy: Any, result: Salvage) -> None:
    try:
        names = [name for name in source.attrs if name not in _OF_SCALES]
    except _FAILURES as error:
        result.lost.append(f"attributes of {source.name} ({_words(error)})")
        return
    for name in names:
        try:
            copy.attrs[name] = source.attrs[name]
        except _FAILURES as error:
            result.lost.append(f"attribute {name} of {source.name} ({_words(error)})")


def _copy_dataset(node: h5py.Dataset, copy: h5py.Group, name: str, result: Salvage) -> None:
    is_text = h5py.check_string_dtype(node.dtype) is not None
    values: Any = None
    gaps: list[tuple[int, int]] = []
    if node.shape:
        values, gaps = _read_in_pieces(node, result, is_text=is_text)
    else:
        values = node[()]
    if gaps and sum(stop - start for start, stop in gaps) == len(node):
        result.lost.append(f"{node.name} (all {len(node)} rows)")
        return
    new = copy.create_dataset(
        name,
        data=values,
        dtype=h5py.string_dtype() if is_text else node.dtype,
        chunks=node.chunks,
        maxshape=node.maxshape if node.chunks else None,
        compression="gzip" if node.chunks else None,
        shuffle=bool(node.chunks) or None,
        fillvalue=None if is_text else node.fillvalue,
    )
    _copy_attributes(node, new, result)
    result.num_whole += not gaps
    result.lost += [f"{node.name}: rows {start} to {stop - 1} of {len(node)}" for start, stop in gaps]


def _read_in_pieces(
    node: h5py.Dataset, result: Salvage, *, is_text: bool
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Returns the values, missing where they cannot be read, and the stretches of such rows."""
    values = np.full(node.shape, "" if is_text else node.fillvalue, dtype=object if is_text else node.dtype)
    reader = node.asstr(errors="replace") if is_text else node
    gaps: list[tuple[int, int]] = []
    for start, stop, is_there in _pieces(node, result.num_bytes):
        result.say(node.name)
        try:
            if not is_there:
                raise OSError("beyond the end of the file")
            values[start:stop] = reader[start:stop]
        except _FAILURES:
            gaps.append((gaps.pop()[0] if gaps and gaps[-1][1] == start else start, stop))
    return values, gaps


def _pieces(node: h5py.Dataset, num_bytes: int) -> Iterator[tuple[int, int, bool]]:
    """Yields stretches of rows that are stored together, and whether they lie within the file."""
    length = len(node)
    if node.chunks is None:
        offset = node.id.get_offset()
        row_bytes = max(1, node.dtype.itemsize * int(np.prod(node.shape[1:])))
        there = length if offset is None else min(length, max(0, (num_bytes - offset) // row_bytes))
        if there:
            yield 0, there, True
        if there < length:
            yield there, length, False
        return
    size = node.chunks[0]
    beyond = set()
    for number in range(node.id.get_num_chunks()):
        chunk = node.id.get_chunk_info(number)
        if chunk.byte_offset + chunk.size > num_bytes:
            beyond.add(chunk.chunk_offset[0])
    for start in range(0, length, size):
        yield start, min(start + size, length), start not in beyond


def _attach_scales(source: h5py.File, copy: h5py.File, result: Salvage) -> None:
    """Gives axes their scales again, where both are there."""
    names: list[str] = []
    copy.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
    for name in names:
        if f"/{name}" in result.skip:
            continue
        result.say(f"/{name}")
        try:
            axes = [(axis, own.name) for axis, dim in enumerate(source[name].dims) for own in dim.values()]
        except _FAILURES as error:
            result.lost.append(f"which axes /{name} has ({_words(error)})")
            continue
        for axis, scale in axes:
            if scale in copy:
                if not copy[scale].is_scale:
                    copy[scale].make_scale(scale.rsplit("/", 1)[-1])
                copy[name].dims[axis].attach_scale(copy[scale])


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
