"""Figure: held-out accuracy by step, sampled and greedy apart, with peak and onset of a cliff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from gradscope.derive import wilson_interval
from gradscope.detectors.cliff import find_cliff
from gradscope.figures.bands import band_words, over_runs
from gradscope.figures.base import Drawing, NothingToDrawError, stack
from gradscope.figures.cells import Cell, group_cells
from gradscope.figures.panels import legend_below, panel_grid, settle_layout, step_axis, title_row
from gradscope.figures.style import BAND_OPACITY, COLUMN_WIDTH, FULL_WIDTH, Look, paper_style, policy_looks
from gradscope.stats.evaluations import Evaluations, Setting, evaluation_series

SEEN = ("cliff", "strong")
"""Verdicts of the detector that are marked."""
MARKS = {"peak": ("*", 10.0), "cliff onset": ("X", 6.0)}
"""Marker and size of each mark."""


def draw(runs: Sequence[xr.DataTree]) -> Drawing:
    """Held-out accuracy by step, sampled and greedy apart, with the peak and onset of a cliff.

    Repeated evaluations of one step are pooled. Peak and onset are marked only where the cliff detector
    says `cliff` or `strong`.

    Raises:
        NothingToDrawError: No run has evaluations.
        DataError: A run is given twice.
    """
    every = group_cells(runs)
    curves = {cell.name: [evaluation_series(run) for run in cell.runs] for cell in every}
    cells = [cell for cell in every if any(curves[cell.name])]
    if not cells:
        raise NothingToDrawError(
            "no run holds evaluations (/eval is empty). Train with evaluate.every above 0."
        )
    rows = _rows(cells, curves)
    num_columns = max(len(ways) for _, ways in rows)
    looks = policy_looks(cell.layout for cell in cells)
    with paper_style():
        figure, grid = panel_grid(
            len(rows), num_columns, width=FULL_WIDTH if num_columns > 1 else COLUMN_WIDTH, row_height=1.8,
            legend_lines=3 if num_columns > 1 else 5, sharex=True, sharey="row",
        )  # fmt: skip
        tables = []
        for row, (members, ways) in enumerate(rows):
            for column, (axes, way) in enumerate(zip(grid[row], ways, strict=False)):
                for cell in members:
                    known = [run.get(way) for run in curves[cell.name]]
                    tables.append(_draw_cell(axes, cell, way, known, looks[cell.layout]))
                step_axis(axes, label=all(len(below) <= column for _, below in rows[row + 1 :]))
            title_row(grid[row], members[0].setting, [str(way) for way in ways])
            _accuracy_axis(grid[row, 0])
            for axes in grid[row, len(ways) :]:
                axes.set_axis_off()
        table = stack(tables)
        _legend(figure, cells, looks, table)
        settle_layout(figure)
    return Drawing(figure, table)


def _rows(
    cells: Sequence[Cell], curves: Mapping[str, Sequence[Mapping[Setting, Evaluations]]]
) -> list[tuple[list[Cell], list[Setting]]]:
    """Returns for each setting its cells and the ways in which any of them was evaluated."""
    rows = []
    for topic in dict.fromkeys(cell.setting for cell in cells):
        members = [cell for cell in cells if cell.setting == topic]
        ways = {way for cell in members for run in curves[cell.name] for way in run}
        rows.append((members, sorted(ways, key=str, reverse=True)))
    return rows


def _accuracy_axis(axes: Axes) -> None:
    axes.set_ylabel("Accuracy")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_cell(
    axes: Axes, cell: Cell, way: Setting, curves: Sequence[Evaluations | None], look: Look
) -> pd.DataFrame:
    """Draws one cell's accuracy: of one run with binomial intervals, of several with their band."""
    known = [(curve, seed) for curve, seed in zip(curves, cell.seeds, strict=True) if curve is not None]
    tables = [_draw_run(axes, curve, seed, look, alone=len(known) == 1) for curve, seed in known]
    if len(known) > 1:
        tables.append(_draw_mean(axes, [curve for curve, _ in known], look))
    if not tables:  # another cell of the row was evaluated so, this one was not
        return pd.DataFrame()
    table = stack(tables)
    columns = {"cell": cell.name, "dataset": way.dataset, "evaluated": str(way)}
    for place, (name, text) in enumerate(columns.items()):
        table.insert(place, name, text)
    return table


def _draw_run(axes: Axes, curve: Evaluations, seed: str, look: Look, *, alone: bool) -> pd.DataFrame:
    low, high = wilson_interval(curve.correct, curve.total)
    axes.plot(
        curve.step, curve.accuracy, color=look.colour, linestyle=look.dashes, label=f"_run_{seed}",
        marker=look.marker if alone else "", linewidth=1.3 if alone else 0.5, alpha=1.0 if alone else 0.5,
    )  # fmt: skip
    if alone:
        axes.fill_between(curve.step, low, high, color=look.colour, alpha=BAND_OPACITY, linewidth=0)
    columns = {"drawn_as": "run", "seed": seed, "step": curve.step, "value": curve.accuracy}
    table = pd.DataFrame({**columns, "low": low, "high": high, "num_runs": 1})
    return stack([table, _mark_cliff(axes, curve, seed, look)])


def _draw_mean(axes: Axes, curves: Sequence[Evaluations], look: Look) -> pd.DataFrame:
    band = over_runs([xr.DataArray(curve.accuracy, {"step": curve.step}, ("step",)) for curve in curves])
    axes.plot(
        band["step"], band["mean"], color=look.colour, linestyle=look.dashes, marker=look.marker,
        label="_mean",
    )  # fmt: skip
    axes.fill_between(
        band["step"], band["low"], band["high"], color=look.colour, alpha=BAND_OPACITY, linewidth=0
    )
    table = band.rename(mean="value").to_dataframe().reset_index()
    table.insert(0, "drawn_as", "mean")
    table.insert(1, "seed", "")
    return table


def _mark_cliff(axes: Axes, curve: Evaluations, seed: str, look: Look) -> pd.DataFrame:
    """Marks the peak and the first evaluation after the break, where there is a cliff."""
    cliff = find_cliff(curve.correct, curve.total, step=curve.step)
    if cliff.verdict not in SEEN or cliff.index is None:
        return pd.DataFrame()
    tables = []
    for name, place in {"peak": int(np.argmax(curve.accuracy)), "cliff onset": cliff.index}.items():
        marker, size = MARKS[name]
        at = {"step": curve.step[[place]], "value": curve.accuracy[[place]]}
        axes.plot(
            at["step"], at["value"], marker=marker, markersize=size, color=look.colour, linestyle="none",
            markeredgecolor="white", markeredgewidth=0.5, zorder=5, label=f"_{name}_{seed}",
        )  # fmt: skip
        tables.append(pd.DataFrame({"drawn_as": name, "seed": seed, **at, "num_runs": 1}))
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
    bands = band_words([len(cell.runs) for cell in cells])
    several = f"Thin lines: single runs; thick: their mean; bands: {bands}."
    one = "Band of one seed: 95 % binomial interval of each evaluation."
    legend_below(figure, handles, " ".join([several] * (not all(alone)) + [one] * any(alone)))
