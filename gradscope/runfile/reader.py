"""Opens a run as an xarray.DataTree, also while it is being written and after a crash."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from gradscope.runfile.batch import Batch, Columns, select
from gradscope.runfile.content import Content
from gradscope.runfile.layout import Layout
from gradscope.runfile.load import Loaded, load
from gradscope.runfile.reading import Lazy
from gradscope.runfile.several import concatenated
from gradscope.runfile.stored import Source, decoded, lazy_variable
from gradscope.schema import DAMAGE, SUPERSEDED, TABLES, Variable, dim_description

Nodes = Mapping[str, Mapping[str, xr.Variable]]


def open_run(
    path: str | Path | Sequence[str | Path], *, chunks: Mapping[str, int] | None = None
) -> xr.DataTree:
    """Returns everything logged so far, up to the last whole record.

    What may be large, `/modules` and `/rows`, is read when its values are asked for. Missing values are NaN,
    counts included; only variables that are never missing stay integers. Groups and variables that nobody
    wrote are absent. Rows that a resume left behind stand under `superseded`. Evaluations are in the order of
    their steps. The tree is called as the run directory is. The root attribute `damage` says what is lost or
    cannot be used, which also warns (UserWarning); a run without damage has no such attribute.

    Of a list of runs every variable has the dim `run` in front, with the coordinates workflow, policy, scale,
    task and seed; what a run lacks is missing. What resumes left behind is not in it.

    Args:
        path: The run directory or its `run.h5`, or a list of such.
        chunks: For a list: lengths of dask's chunks by dim, `{}` for one chunk a variable and run. Little but
            coordinates is read then until asked for, so runs may exceed memory. Needs dask.

    Raises:
        RunFileError: There is no run, the files are not ours, not readable, damaged or of several runs, or
            their format is too new; dask is absent.
    """
    if isinstance(path, str | Path):
        return _open_one(path, _is_large)
    lazy = _is_large if chunks is None else _is_optional
    return concatenated(list(path), lambda one: _open_one(one, lazy), chunks=chunks)


def _open_one(path: str | Path, lazy: Lazy) -> xr.DataTree:
    loaded = load(path, lazy)
    run = to_datatree(loaded.content, name=loaded.paths.name, deferred=_lazy_variables(loaded))
    if loaded.damage:
        run.attrs[DAMAGE] = " ".join(loaded.damage)
        warnings.warn(f"{path}: {run.attrs[DAMAGE]}", stacklevel=3)
    return run


def _is_optional(table: str, variable: Variable) -> bool:
    return table not in ("segments", "events") and not variable.required


def _is_large(table: str, variable: Variable) -> bool:
    return table in ("modules", "rows") and not variable.required


def _lazy_variables(loaded: Loaded) -> Nodes:
    """Returns the columns that were left on the disk."""
    nodes: dict[str, dict[str, xr.Variable]] = {}
    source = Source.of(loaded)
    for column in loaded.deferred:
        variable = lazy_variable(column, loaded.content.layout, source)
        nodes.setdefault(column.group, {})[column.variable.name] = variable
    return nodes


def to_datatree(content: Content, *, name: str | None = None, deferred: Nodes | None = None) -> xr.DataTree:
    """Returns the run in the form in which everybody reads it, with the name that its figures bear.

    Args:
        content: What is in memory.
        name: The tree's name.
        deferred: What is not: group to variables.
    """
    root = _root(content.layout).assign_attrs(dict(content.attributes))
    nodes: dict[str, xr.Dataset] = {"/": root, **_datasets(content.tables, content.layout)}
    for segment, group in content.superseded.items():
        place = f"/{SUPERSEDED}/{segment}"
        nodes[place] = xr.Dataset(attrs=dict(group.attributes))
        nodes |= {place + inner: data for inner, data in _datasets(group.tables, content.layout).items()}
    for place, variables in (deferred or {}).items():
        nodes[place] = nodes[place].assign(variables)
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
    values = decoded(values, variable.fill, is_required=variable.required)
    if values.dtype == object:
        values = values.astype(str)
    attributes = {"units": variable.units, "long_name": variable.long_name}
    return xr.Variable(variable.dims, values, attributes, fastpath=True)
