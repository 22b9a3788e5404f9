"""Figure: held-out accuracy by step, sampled and greedy apart, with peak and onset of a cliff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from gradscope.detectors.cliff import Cliff, find_cliff
from gradscope.figures.bands import binomial_interval, over_runs
from gradscope.figures.base import Drawing, NothingToDrawError, stack
from gradscope.figures.cells import Cell, group_cells
from gradscope.figures.panels import legend_below, panel_grid, step_axis, title_row
from gradscope.figures.style import COLUMN_WIDTH, FULL_WIDTH, Look, paper_style, policy_looks

SEEN = ("cliff", "strong")
"""Verdicts of the detector that are marked."""
MARKS = {"peak": ("*", 10.0), "cliff onset": ("X", 6.0)}
"""Marker and size of each mark."""


class Setting(NamedTuple):
    """One way of evaluating: accuracies of different settings are never one curve."""

    dataset: str
    greedy: bool
    temperature: float | None

    def __str__(self) -> str:
        if self.greedy:
            return f"{self.dataset}, greedy"
        return f"{self.dataset}, sampled" + (
            "" if self.temperature is None else f" at T = {self.temperature:g}"
        )


def draw(runs: Sequence[xr.DataTree]) -> Drawing:
    """Held-out accuracy by step, sampled and greedy apart, with the peak and onset of a cliff.

    Repeated evaluations of one step are pooled. Peak and onset are marked only where the cliff detector
    says `cliff` or `strong`.

    Raises:
        NothingToDrawError: No run has evaluations.
        DataError: A run is given twice.
    """
    every = group_cells(runs)
    curves = {cell.name: [_curves(run) for run in cell.runs] for cell in every}
    cells = [cell for cell in every if any(curves[cell.name])]
    if not cells:
        raise NothingToDrawError(
            "no run holds evaluations (/eval is empty). Train with evaluate.every above 0."
        )
    ways = sorted({way for cell in cells for run in curves[cell.name] for way in run}, key=str, reverse=True)
    topics = list(dict.fromkeys(cell.setting for cell in cells))
    looks = policy_looks(cell.layout for cell in cells)
    with paper_style():
        figure, grid = panel_grid(
            len(topics), len(ways), width=FULL_WIDTH if len(ways) > 1 else COLUMN_WIDTH, row_height=1.8,
            legend_lines=3 if len(ways) > 1 else 5, sharex=True, sharey="row",
        )  # fmt: skip
        tables = []
        for row, topic in enumerate(topics):
            for axes, way in zip(grid[row], ways, strict=True):
                for cell in (cell for cell in cells if cell.setting == topic):
                    pairs = zip(curves[cell.name], cell.seeds, strict=True)
                    known = [(run[way], seed) for run, seed in pairs if way in run]
                    if known:
                        tables.append(_draw_cell(axes, cell, way, known, looks[cell.layout]))
                step_axis(axes, label=row == len(topics) - 1)
            title_row(grid[row], topic, [str(way) for way in ways])
            grid[row, 0].set_ylabel("Accuracy")
            grid[row, 0].set_ylim(0, 1.03)
            grid[row, 0].yaxis.set_major_formatter(PercentFormatter(1.0))
        table = stack(tables)
        _legend(figure, cells, looks, table)
    return Drawing(figure, table)


def _curves(run: xr.DataTree) -> dict[Setting, xr.Dataset]:
    """Returns each setting's counts by step, repeats pooled; dims `(step,)`."""
    if "eval" not in run.children or not run["eval"].sizes.get("evaluation"):
        return {}
    table = run["eval"].to_dataset()[["step", "dataset", "greedy", "temperature", "num_correct", "num_total"]]
    frame = table.to_dataframe().dropna(subset=["num_correct", "num_total"])
    frame = frame[frame["num_total"] > 0].drop_duplicates(
        ["step", "dataset", "greedy", "temperature", "num_correct", "num_total"]
    )
    frame["greedy"] = frame["greedy"] == 1
    frame.loc[frame["greedy"], "temperature"] = np.nan
    curves = {}
    for (dataset, greedy, temperature), rows in frame.groupby(
        ["dataset", "greedy", "temperature"], dropna=False
    ):
        counts = rows.groupby("step")[["num_correct", "num_total"]].sum()
        known = None if np.isnan(temperature) else float(temperature)
        curves[Setting(str(dataset), bool(greedy), known)] = counts.to_xarray()
    return curves


def _draw_cell(
    axes: Axes, cell: Cell, way: Setting, curves: Sequence[tuple[xr.Dataset, str]], look: Look
) -> pd.DataFrame:
    """Draws one cell's accuracy: of one run with binomial intervals, of several with their band."""
    tables = []
    for counts, seed in curves:
        accuracy = counts["num_correct"] / counts["num_total"]
        low, high = binomial_interval(counts["num_correct"], counts["num_total"])
        alone = len(curves) == 1
        axes.plot(
            counts["step"], accuracy, color=look.colour, linestyle=look.dashes,
            marker=look.marker if alone else "", linewidth=1.3 if alone else 0.5, alpha=1.0 if alone else 0.5,
            label=f"_run_{cell.name}_{seed}",
        )  # fmt: skip
        if alone:
            axes.fill_between(counts["step"], low, high, color=look.colour, alpha=0.18, linewidth=0)
        cliff = find_cliff(counts["num_correct"], counts["num_total"], step=counts["step"])
        rows = {
            "drawn_as": "run",
            "seed": seed,
            "value": accuracy.values,
            "low": low,
            "high": high,
            "num_runs": 1,
        }
        tables += [_rows(counts["step"].values, rows), _mark_cliff(axes, accuracy, cliff, seed, look)]
    if len(curves) > 1:
        band = over_runs([counts["num_correct"] / counts["num_total"] for counts, _ in curves])
        axes.plot(
            band["step"], band["mean"], color=look.colour, linestyle=look.dashes, marker=look.marker,
            label=f"_mean_{cell.name}",
        )  # fmt: skip
        axes.fill_between(band["step"], band["low"], band["high"], color=look.colour, alpha=0.18, linewidth=0)
        rows = {"drawn_as": "mean", "seed": "", "value": band["mean"].values, "low": band["low"].values}
        tables.append(
            _rows(
                band["step"].values,
                {**rows, "high": band["high"].values, "num_runs": band["num_runs"].values},
            )
        )
    table = stack(tables)
    for place, (name, text) in enumerate(
        {"cell": cell.name, "dataset": way.dataset, "evaluated": str(way)}.items()
    ):
        table.insert(place, name, text)
    return table


def _rows(steps: np.ndarray, columns: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame({"step": steps, **columns})


def _mark_cliff(axes: Axes, accuracy: xr.DataArray, cliff: Cliff, seed: str, look: Look) -> pd.DataFrame:
    """Marks the peak and the first evaluation after the break, where there is a cliff."""
    if cliff.verdict not in SEEN:
        return pd.DataFrame()
    peak = accuracy["step"].values[int(np.argmax(accuracy.values))]
    tables = []
    for (name, (marker, size)), step in zip(MARKS.items(), (peak, cliff.step), strict=True):
        value = float(accuracy.sel(step=step))
        axes.plot(
            [step], [value], marker=marker, markersize=size, color=look.colour, markeredgecolor="white",
            markeredgewidth=0.5, linestyle="none", zorder=5, label=f"_{name}_{seed}",
        )  # fmt: skip
        tables.append(
            _rows(np.array([step]), {"drawn_as": name, "seed": seed, "value": value, "num_runs": 1})
        )
    return stack(tables)


def _legend(figure: Figure, cells: Sequence[Cell], looks: Mapping[str, Look], drawn: pd.DataFrame) -> None:
    sizes = {layout: {cell.size for cell in cells if cell.layout == layout} for layout in looks}
    handles = [
        Line2D(
            [], [], color=look.colour, linestyle=look.dashes, marker=look.marker, label=f"{layout}, {size}"
        )
        for layout, look in looks.items()
        for size in [" or ".join(sorted(sizes[layout]))]
    ]
    for name, (marker, size) in MARKS.items():
        if (drawn["drawn_as"] == name).any():
            label = {"peak": "peak of a run with a cliff", "cliff onset": "its onset"}[name]
            handles.append(
                Line2D([], [], color="0.3", linestyle="none", marker=marker, markersize=size, label=label)
            )
    alone = [len(cell.runs) == 1 for cell in cells]
    several = "Thin lines: single runs; thick: their mean; bands: 95 % interval of the mean over seeds."
    one = "Bands of one seed: 95 % binomial interval of each evaluation."
    legend_below(figure, handles, " ".join([several] * (not all(alone)) + [one] * any(alone)))
