"""The HDF5 side of the run file: making one whole, growing one.

Every axis has a dimension scale, so any netCDF4 reader opens the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from gradscope.runfile.batch import Batch, Columns
from gradscope.runfile.content import Content, segment_spans
from gradscope.runfile.layout import Layout
from gradscope.schema import (
    SUPERSEDED,
    TABLES,
    Table,
    Variable,
    dim_description,
)

_ATTRIBUTE_BYTES = 60_000
"""HDF5 of the widest compatibility holds no attribute above 64 KB."""
_CHUNK_BYTES = 65_536
_LONGEST_CHUNK = 4096
_WIDE_ROW_BYTES = 512
_WIDE_CHUNK = 64
_DATASET_BYTES = 3000
_TEXT_BYTES = 48
"""What a dataset takes besides its chunks, and an average text."""

Scales = dict[str, h5py.Dataset]


def image(content: Content, *, name: str) -> bytes:
    """Returns the whole run as the bytes of a file.

    HDF5 works in memory only: a disk that fills up while it writes has been seen to end the process.

    Args:
        content: The run.
        name: Any name that no other image being made at the same time has.
    """
    with h5py.File(name, "w", driver="core", backing_store=False) as file:
        _write_attributes(file, content.attributes)
        scales = _write_labels(file, content.layout)
        _append_tables(file, content.tables, content.layout, scales)
        for segment, group in content.superseded.items():
            # Scales of its own: the list of users that HDF5 keeps with each scale has a fixed limit.
            node = file.require_group(SUPERSEDED).create_group(segment)
            _write_attributes(node, group.attributes)
            _append_tables(node, group.tables, content.layout, _write_labels(node, content.layout))
        return _finished(file)


@dataclass(frozen=True)
class Grown:
    """A file with rows appended.

    Attributes:
        data: Its bytes.
        spread: Its size over that of what it holds, about 1 when freshly made. HDF5 leaves holes where the
            last chunk of a variable has been compressed anew.
    """

    data: bytes
    spread: float


def grown(before: bytes, batch: Batch, layout: Layout, attributes: Mapping[str, Any], *, name: str) -> Grown:
    """Returns a file that has exactly this layout with rows appended; otherwise as `image`."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(max(_CHUNK_BYTES, len(before) // 4), backing_store=False)
    access.set_file_image(before)
    with h5py.File(h5py.h5f.open(name.encode(), h5py.h5f.ACC_RDWR, access)) as file:
        _write_attributes(file, attributes)
        scales = {dim: file[dim] for dim in layout.coordinates()}
        _append_tables(file, batch, layout, scales)
        data = _finished(file)
        return Grown(data, len(data) / _used_bytes(file))


def _used_bytes(file: h5py.File) -> int:
    """Returns about how large a fresh file with the same data is."""
    sizes: list[int] = []

    def add(_: str, node: h5py.Dataset | h5py.Group) -> None:
        if isinstance(node, h5py.Dataset):
            text = _TEXT_BYTES * len(node) if h5py.check_string_dtype(node.dtype) else 0
            sizes.append(_DATASET_BYTES + node.id.get_storage_size() + text)

    file.visititems(add)
    return sum(sizes)


def _finished(file: h5py.File) -> bytes:
    _write_spans(file)
    file.flush()
    return file.id.get_file_image()


def _write_attributes(group: h5py.Group, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(value, str) and len(value.encode()) > _ATTRIBUTE_BYTES:
            value = json.dumps({"too_long_for_an_attribute_see": f"/segments/{name}"})
        group.attrs[name] = value


def _write_labels(group: h5py.Group, layout: Layout) -> Scales:
    """Writes the coordinates of all dims that do not grow and the root's variables; returns the scales."""
    scales: Scales = {}
    for dim, values in layout.coordinates().items():
        is_text = isinstance(values[0], str)
        dtype = h5py.string_dtype() if is_text else "i8"
        scales[dim] = group.create_dataset(dim, data=values, dtype=dtype)
        scales[dim].make_scale(dim)
        scales[dim].attrs.update({"long_name": dim_description(dim), "units": "" if is_text else "1"})
    for variable, own in layout.root_values().items():
        dtype = h5py.string_dtype() if variable.dtype == "str" else variable.dtype
        dataset = group.create_dataset(variable.name, data=own, dtype=dtype)
        _describe(dataset, variable)
        dataset.dims[0].attach_scale(scales[variable.dims[0]])
    return scales


def _append_tables(file: h5py.Group, batch: Batch, layout: Layout, scales: Scales) -> None:
    for name, columns in batch.items():
        table = TABLES[name]
        group = file.require_group(table.group)
        group.attrs["description"] = TABLES[table.group].description
        _append_table(group, table, columns, layout, scales)


def _append_table(group: h5py.Group, table: Table, columns: Columns, layout: Layout, scales: Scales) -> None:
    start = len(group[table.dim]) if table.dim in group else 0
    stop = start + len(columns[table.dim])
    present = [name for name in group if layout.variable(table.name, name) is not None]
    names = dict.fromkeys([table.dim, *present, *columns])
    for name in names:
        variable = layout.variable(table.name, name)
        if variable is None:
            continue
        if name not in group:
            dataset = _create(group, variable, table.dim, stop, layout, scales)
        else:
            dataset = group[name]
            dataset.resize(stop, axis=0)
        if name in columns and stop > start:
            dataset[start:stop] = columns[name]


def _create(
    group: h5py.Group, variable: Variable, dim: str, length: int, layout: Layout, scales: Scales
) -> h5py.Dataset:
    rest = layout.shape(variable)
    is_text = variable.dtype == "str"
    row_bytes = (16 if is_text else np.dtype(variable.dtype).itemsize) * int(np.prod(rest))
    rows = _WIDE_CHUNK if is_text or row_bytes > _WIDE_ROW_BYTES else _CHUNK_BYTES // max(row_bytes, 1)
    dataset = group.create_dataset(
        variable.name,
        shape=(length, *rest),
        maxshape=(None, *rest),
        chunks=(min(rows, _LONGEST_CHUNK), *rest),
        dtype=h5py.string_dtype() if is_text else variable.dtype,
        fillvalue=None if is_text else variable.fill,
        compression="gzip",
        compression_opts=6,
        shuffle=True,
    )
    _describe(dataset, variable)
    if variable.name == dim:
        dataset.make_scale(dim)
        return dataset
    for axis, name in enumerate(variable.dims):
        dataset.dims[axis].attach_scale(group[dim] if axis == 0 else scales[name])
    return dataset


def _describe(dataset: h5py.Dataset, variable: Variable) -> None:
    dataset.attrs.update({"units": variable.units, "long_name": variable.long_name})
    is_coordinate = variable.name == variable.dims[0]
    if variable.dtype != "str" and not is_coordinate:
        dataset.attrs["_FillValue"] = np.array([variable.fill], dtype=variable.dtype)


def _write_spans(file: h5py.File) -> None:
    if "segments" not in file:
        return
    groups = [file, *file.get(SUPERSEDED, {}).values()]
    steps = [group["train"] for group in groups if "train" in group]
    segments = file["segments"]
    start, end = segment_spans(len(segments["segment"]), steps)
    segments["start_step"][...] = start
    segments["end_step"][...] = end
