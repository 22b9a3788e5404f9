"""Opens several runs as one tree on the dim `run`, in memory or piece by piece through dask."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from gradscope.errors import RunFileError
from gradscope.extras import extra_of, installing
from gradscope.runfile.damage import usable
from gradscope.schema import LABEL_DIMS, MIRROR_DIMS, NUMBERED_DIMS, SUPERSEDED

CELL = {
    "workflow": "name of the workflow",
    "policy": "how roles share parameters: shared, isolated, or mixed",
    "scale": "size of the base model, or its path where that names none",
    "task": "name of the task",
    "seed": "seed of the run, as text; empty where it has none",
}
"""Coordinates on the dim `run`, and what they say."""

_FIXED = (*LABEL_DIMS, *MIRROR_DIMS, *NUMBERED_DIMS)
_SIZE = re.compile(r"\d+(?:\.\d+)?[MBmb]\b")


def concatenated(
    paths: Sequence[str | Path],
    open_one: Callable[[str | Path], xr.DataTree],
    *,
    chunks: Mapping[str, int] | None,
) -> xr.DataTree:
    """Returns runs side by side; see `open_run`.

    Raises:
        RunFileError: There are none, or dask is needed and absent; what `open_one` raises.
    """
    if not paths:
        raise RunFileError("open_run: the list of runs is empty. Give at least one run directory.")
    if chunks is not None and find_spec("dask") is None:
        raise RunFileError(
            "open_run: chunks need the package dask, which is not installed. "
            f"{installing(extra_of('dask'))}, or leave chunks out."
        )
    runs = [open_one(path) for path in paths]
    places = dict.fromkeys(node.path for run in runs for node in run.subtree if not _is_superseded(node.path))
    labels = {dim: _union(run.coords[dim].values for run in runs if dim in run.coords) for dim in _FIXED}
    cells = _cells(runs, paths)
    nodes = {}
    for place in places:
        nodes[place] = _joined([_node(run, place) for run in runs], labels, cells, chunks)
    return xr.DataTree.from_dict(nodes, name="runs")


def _is_superseded(place: str) -> bool:
    return place.startswith(f"/{SUPERSEDED}")


def _node(run: xr.DataTree, place: str) -> xr.Dataset:
    """Returns a group of one run; one without the group's dims where the run has no such group."""
    try:
        node = run[place] if place != "/" else run
    except KeyError:
        return xr.Dataset()
    assert isinstance(node, xr.DataTree)
    return node.to_dataset(inherit=True)


def _joined(
    datasets: Sequence[xr.Dataset],
    labels: Mapping[str, list[Any]],
    cells: Mapping[str, xr.Variable],
    chunks: Mapping[str, int] | None,
) -> xr.Dataset:
    if chunks is not None:
        datasets = [data.chunk(chunks) for data in datasets]
    fills: dict[str, Any] = {}
    for data in datasets:
        for name, variable in data.data_vars.items():
            fills[str(name)] = "" if variable.dtype.kind in "OUT" else np.nan
    wide = []
    for data in datasets:
        own = {dim: values for dim, values in labels.items() if dim in data.dims}
        wide.append(data.reindex(own, fill_value={k: v for k, v in fills.items() if k in data}))
    joined = xr.concat(
        wide,
        dim="run",
        join="outer",
        data_vars="all",
        coords="minimal",
        compat="equals",
        fill_value=fills,
        combine_attrs="drop_conflicts",
    )
    return joined.assign_coords({name: own for name, own in cells.items() if name not in joined.data_vars})


def _union(values: Iterable[Iterable[Any]]) -> list[Any]:
    """Returns labels in the order in which they appear first."""
    return list(dict.fromkeys(label for own in values for label in own))


def _cells(runs: Sequence[xr.DataTree], paths: Sequence[str | Path]) -> dict[str, xr.Variable]:
    names = [str(run.name or "") for run in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RunFileError(f"open_run: run {twice} is given twice. Give each run once.")
    cells = {"run": xr.Variable(("run",), np.array(names), {"long_name": "name of the run", "units": ""})}
    rows = [cell_of(run) for run in runs]
    for name, long_name in CELL.items():
        values = np.array([row[name] for row in rows])
        cells[name] = xr.Variable(("run",), values, {"long_name": long_name, "units": ""})
    return cells


def cell_of(run: xr.DataTree) -> dict[str, str]:
    """Returns the workflow, policy, scale, task and seed of a run; empty where its file does not say."""
    attributes, _ = usable({str(name): value for name, value in run.attrs.items()})
    config = json.loads(attributes.get("config_json", "{}"))
    model = _text(config, "model", "path")
    size = _SIZE.search(model)
    return {
        "workflow": _text(config, "workflow", "name"),
        "policy": _sharing(run),
        "scale": size.group().upper() if size else model,
        "task": _text(config, "task", "name"),
        "seed": str(attributes.get("seed", "")),
    }


def _text(config: Mapping[str, Any], section: str, key: str) -> str:
    found = config.get(section)
    value = found.get(key, "") if isinstance(found, dict) else ""
    return value if isinstance(value, str) else ""


def _sharing(run: xr.DataTree) -> str:
    """Returns `shared` when all slots train one policy, `isolated` when each role has its own."""
    slots = run.to_dataset()[["slot_role", "slot_policy"]]
    pairs = set(zip(slots["slot_role"].values.tolist(), slots["slot_policy"].values.tolist(), strict=True))
    roles, policies = ({pair[axis] for pair in pairs} for axis in (0, 1))
    if len(policies) == 1:
        return "shared"
    return "isolated" if len(pairs) == len(roles) == len(policies) else "mixed"
