"""Opens a run as an xarray.DataTree, also while it is being written and after a crash."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import xarray as xr

from gradscope.runfile.batch import Batch, Columns, select
from gradscope.runfile.content import Content
from gradscope.runfile.layout import Layout
from gradscope.runfile.load import load
from gradscope.schema import DAMAGE, SUPERSEDED, TABLES, Variable, dim_description


def open_run(path: str | Path) -> xr.DataTree:
    """Returns everything logged so far, up to the last whole record, loaded into memory.

    Missing values are NaN, counts included; only variables that are never missing stay integers. Groups and
    variables that nobody wrote are absent. Rows that a resume left behind stand under `superseded`.
    Evaluations are in the order of their steps. The tree is called as the run directory is. The root
    attribute `damage` says what is lost or cannot be used, which also warns (UserWarning); a run without
    damage has no such attribute.

    Args:
        path: The run directory, or its `run.h5`.

    Raises:
        RunFileError: There is no run, the files are not ours, not readable, damaged or of several runs, or
            their format is too new.
    """
    loaded = load(path)
    run = to_datatree(loaded.content, name=loaded.paths.name)
    if loaded.damage:
        run.attrs[DAMAGE] = " ".join(loaded.damage)
        warnings.warn(f"{path}: {run.attrs[DAMAGE]}", stacklevel=2)
    return run


def to_datatree(content: Content, *, name: str | None = None) -> xr.DataTree:
    """Returns the run in the form in which everybody reads it, with the name that its figures bear."""
    root = _root(content.layout).assign_attrs(dict(content.attributes))
    nodes: dict[str, xr.Dataset] = {"/": root, **_datasets(content.tables, content.layout)}
    for segment, group in content.superseded.items():
        place = f"/{SUPERSEDED}/{segment}"
        nodes[place] = xr.Dataset(attrs=dict(group.attributes))
        nodes |= {place + inner: data for inner, data in _datasets(group.tables, content.layout).items()}
    return xr.DataTree.from_dict(nodes, name=name)


def _root(layout: Layout) -> xr.Dataset:
    coordinates = {}
    for dim, labels in layout.coordinates().items():
        units = "" if isinstance(labels[0], str) else "1"
        coordinates[dim] = xr.Variable((dim,), labels, {"long_name": dim_description(dim), "units": units})
    values = layout.root_values().items()
    data = {v.name: _variable(np.array(own, str if v.dtype == "str" else v.dtype), v) for v, own in values}
    return xr.Dataset(data, coordinates)


def _datasets(tables: Batch, layout: Layout) -> dict[str, xr.Dataset]:
    datasets: dict[str, xr.Dataset] = {}
    for name, columns in tables.items():
        table = TABLES[name]
        if name == "eval":
            columns = select(columns, np.argsort(columns["step"], kind="stable"))
        dataset = _dataset(columns, name, layout)
        place = f"/{table.group}"
        datasets[place] = datasets[place].merge(dataset) if place in datasets else dataset
        datasets[place].attrs["description"] = TABLES[table.group].description
    return datasets


def _dataset(columns: Columns, table: str, layout: Layout) -> xr.Dataset:
    variables = {}
    for name, column in columns.items():
        variable = layout.variable(table, name)
        if variable is not None:
            variables[name] = _variable(column, variable)
    dim = TABLES[table].dim
    coordinates = {dim: variables.pop(dim)}
    return xr.Dataset(variables, coordinates)


def _variable(values: np.ndarray, variable: Variable) -> xr.Variable:
    if values.dtype.kind == "i" and not variable.required:
        values = np.where(values == variable.fill, np.nan, values)
    if values.dtype == object:
        values = values.astype(str)
    attributes = {"units": variable.units, "long_name": variable.long_name}
    return xr.Variable(variable.dims, values, attributes, fastpath=True)
