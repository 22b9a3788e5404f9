"""Exports: a saved run in, rows of another tool out."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from gradscope.errors import ConfigError, RunFileError
from gradscope.exporters import EXPORTERS
from gradscope.exporters.names import evaluation_values, gradient_values, train_values, update_values
from gradscope.exporters.omissions import left_out
from gradscope.exporters.sink import Sink, Target
from gradscope.runfile import UpdateRecord, open_run
from gradscope.schema import TABLES

PROJECT = "gradscope"


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        where: File or folder, or project and run.
        num_rows: Rows.
        num_names: Different scalars.
        notes: What of the run does not go there, one sentence each.
    """

    where: str
    num_rows: int
    num_names: int
    notes: tuple[str, ...]


def export_run(
    run: xr.DataTree | str | Path,
    to: str,
    *,
    out: str | Path | None = None,
    project: str = PROJECT,
    name: str | None = None,
    client: Any = None,
) -> Exported:
    """Writes a run's scalars for another tool.

    Tables (csv, parquet) get inner products of gradients too, so that a run read back is judged alike;
    trackers get norms, shares and coherences in their place. What goes nowhere stands in the notes.

    Args:
        run: An opened run, or its path.
        to: Name of an exporter (`csv`, `parquet`, `tensorboard`, `wandb`, `trackio`).
        out: File or folder, for those that write one; nothing may be there.
        project: Project, for trackers that have them.
        name: What to call the run there; by default as its directory is called.
        client: In place of W&B's own library.

    Raises:
        ConfigError: `out` is needed or of no use.
        RunFileError: The run cannot be read, holds no numbers, or something is at `out`.
        UnknownNameError: There is no such exporter.
    """
    exporter = EXPORTERS.get(to)
    path = _checked_out(out, to, needed=bool(exporter.default_path))
    opened = run if isinstance(run, xr.DataTree) else open_run(run)
    rows = list(rows_of(opened, products=exporter.holds_products))
    if not rows:
        raise RunFileError(f"{opened.name or 'run'}: holds neither steps nor evaluations to export.")
    title = name or opened.name or "run"
    sink: Sink = exporter(Target(path=path, project=project, name=title, about=_about(opened), client=client))
    try:
        for step, time, values in rows:
            sink.log(step, values, wall_time=time)
    finally:
        sink.close()
    where = str(path) if exporter.default_path else f"{project}/{sink.run_id}"
    num_names = len({key for _, _, values in rows for key in values})
    about = None if exporter.holds_about else _about(opened)
    return Exported(where, len(rows), num_names, tuple(left_out(opened, about)))


def _checked_out(out: str | Path | None, to: str, *, needed: bool) -> Path:
    if not needed:
        if out is not None:
            raise ConfigError(
                f"--to {to} writes to its own place, not to {out}. Leave -o out; see --project."
            )
        return Path.cwd()
    if out is None:
        raise ConfigError(f"--to {to} needs a place to write to. Give -o PATH.")
    path = Path(out)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise RunFileError(f"{path}: something is there already. Choose another path.")
    return path


def _about(run: xr.DataTree) -> dict[str, Any]:
    root = run.to_dataset()
    slots = [str(slot) for slot in root["slot"].values]
    config = json.loads(run.attrs.get("config_json") or "{}")
    imported = config.get("import") if isinstance(config, dict) else None
    return {
        "limits": list(imported.get("limits") or ()) if isinstance(imported, dict) else [],
        "run_id": str(run.attrs.get("run_id", "")),
        "slots": dict(zip(slots, map(str, root["slot_role"].values), strict=True)),
        "policies": dict(zip(slots, map(str, root["slot_policy"].values), strict=True)),
    }


def rows_of(run: xr.DataTree, *, products: bool) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yields (step, wall time, scalars by name) by step; evaluations of a step follow it, one by one."""
    about = _about(run)
    records = _records(run)
    metrics, times = _metrics(run)
    evaluations = _evaluations(run)
    for step in sorted({*metrics, *records, *evaluations}):
        own = records.get(step, [])
        values = train_values(metrics.get(step, {})) | update_values(own, products=products)
        if not products:
            values |= gradient_values(own, about["slots"])
        time = times.get(step, math.nan)
        if values:
            yield step, time, values
        for evaluation in evaluations.get(step, []):
            yield step, time, evaluation_values(evaluation)


def _dataset(run: xr.DataTree, group: str) -> xr.Dataset:
    return run[group].to_dataset() if group in run.children else xr.Dataset()


def _metrics(run: xr.DataTree) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
    """Returns each step's metrics, those that the caller named included, and its wall time."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    times: dict[int, float] = {}
    for group in ("train", "user"):
        dataset = _dataset(run, group)
        if "step" not in dataset.coords:
            continue
        steps = [int(step) for step in dataset["step"].values]
        for name, variable in dataset.data_vars.items():
            if variable.dims[0] != "step" or name == "segment" or variable.dtype.kind not in "fiub":
                continue
            if name == "wall_time":
                times = dict(zip(steps, map(float, variable.values), strict=True))
                continue
            title = str(variable.attrs["long_name"]) if group == "user" else str(name)
            for step, values in zip(steps, variable.values, strict=True):
                found[step][title] = _by_label(values, variable)
    return dict(found), times


def _by_label(values: Any, variable: xr.DataArray) -> Any:
    """Returns one row of a variable: a number, or a mapping by label."""
    if variable.ndim == 1:
        return float(values)
    labels = map(str, variable[variable.dims[1]].values)
    return dict(zip(labels, map(float, values), strict=True))


def _records(run: xr.DataTree) -> dict[int, list[UpdateRecord]]:
    """Returns each step's updates."""
    updates = _dataset(run, "updates")
    found: dict[int, list[UpdateRecord]] = defaultdict(list)
    if "step" not in updates:
        return {}
    slots = tuple(str(slot) for slot in run.to_dataset()["slot"].values)
    table = TABLES["updates"].variables
    plain = [v.name for v in table if v.dims == ("update",) and (v.dtype == "f8" or v.name == "skipped")]
    scalars = [name for name in plain if name in updates]
    counts = [v.name for v in table if v.dims == ("update", "slot") and v.name in updates]
    arrays = {name: updates[name].values for name in (*scalars, *counts, "step", "policy")}
    nothing = np.full((updates.sizes["update"], len(slots), len(slots)), np.nan)
    gram = updates["gram"].values if "gram" in updates else nothing
    cross = updates["gram_cross"].values if "gram_cross" in updates else nothing
    for row in range(updates.sizes["update"]):
        record = UpdateRecord(
            policy=str(arrays["policy"][row]),
            slots=slots,
            gram=gram[row],
            gram_cross=cross[row],
            counts={name: arrays[name][row] for name in counts},
            scalars={name: _known(name, float(arrays[name][row])) for name in scalars},
        )
        found[int(arrays["step"][row])].append(record)
    return dict(found)


def _known(name: str, value: float) -> float:
    """Returns a number of an update; a flag that was not logged is missing, not -1."""
    return math.nan if name == "skipped" and value < 0 else value


def _evaluations(run: xr.DataTree) -> dict[int, list[Mapping[str, Any]]]:
    """Returns each step's evaluations."""
    table = _dataset(run, "eval")
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for place in range(table.sizes.get("evaluation", 0)):
        row = table.isel(evaluation=place)
        values: dict[str, Any] = {"dataset": str(row["dataset"].item())}
        for name in ("greedy", "num_correct", "num_total", "temperature"):
            values[name] = float(row[name]) if name in row else math.nan
        for name in ("role_accuracy", "role_tokens_mean"):
            if name in row:
                roles = map(str, row["role"].values)
                values[name] = dict(zip(roles, map(float, row[name].values), strict=True))
        found[int(row["step"])].append(values)
    return dict(found)
