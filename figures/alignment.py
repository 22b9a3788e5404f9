"""Figure: realised cosine between every two slots' gradients, early and late in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from gradscope.figures.bands import over_runs
from gradscope.figures.base import Drawing, NothingToDrawError, stack
from gradscope.figures.cells import Cell, names
from gradscope.figures.measures import (
    WINDOWS,
    cells_with_gradients,
    pooled_cosines,
    several_slots,
    window_steps,
)
from gradscope.figures.panels import legend_below, panel_grid, settle_layout, title_row
from gradscope.figures.style import COLUMN_WIDTH, FULL_WIDTH, paper_style

COLOURS = "RdBu_r"
FEW_SLOTS = 4
"""With more, only one cell fits beside another."""
NOT_APPLICABLE = "not applicable: separate policies share no coordinates"
NO_SIGNAL = "too little signal: fewer than 3 steps, or too few of the seeds"
BAR_WIDTH, NAME_LENGTH = 0.6, 0.8
"""Inches that the colour bar and the longest slot name take."""
DARK = 0.6
"""From this cosine on, numbers are white on the colour."""


def draw(runs: Sequence[xr.DataTree]) -> Drawing:
    """Slot by slot cosines of gradients, pooled over the first and the last fifth of the steps.

    Products and squared norms are summed over the steps of a window before they are divided; with several
    seeds the mean of their cosines is shown. Slots of separate policies are hatched, never 0.

    Raises:
        NothingToDrawError: No run has gradients, or no policy has two slots.
        DataError: A run is given twice.
    """
    cells = [cell for cell in cells_with_gradients(runs) if several_slots(cell)]
    if not cells:
        raise NothingToDrawError("no policy is trained by two or more slots, so there is nothing to align.")
    with paper_style():
        figure, grid = _grid(cells)
        tables, images, reasons = [], [], set()
        pairs = grid.reshape(-1, 2)
        for pair, cell in zip(pairs, cells, strict=False):
            spans = [_span(cell, window) for window in WINDOWS]
            title_row(pair, f"{cell.name}, {cell.size}", spans, num_columns=grid.shape[1])
            for axes, window in zip(pair, WINDOWS, strict=True):
                per_run = [pooled_cosines(run, window_steps(run, window)) for run in cell.runs]
                tables.append(_table(cell, window, per_run))
                mean = _mean_cosine(per_run)["cosine"]
                images.append(_heat_map(axes, mean, named=window == WINDOWS[0]))
                reasons |= _hatch_blanks(axes, mean, cell)
        for axes in pairs[len(cells) :].flat:
            axes.set_axis_off()
        _colour_bar(figure, grid, images[0])
        handles = [patch for reason, patch in _patches().items() if reason in reasons]
        legend_below(figure, handles, _note(cells))
        settle_layout(figure, fixed_aspect=True)
    return Drawing(figure, stack(tables))


def _grid(cells: Sequence[Cell]) -> tuple[Figure, NDArray[Any]]:
    """Returns a figure with two panels a cell, two cells in a row where their slots are few."""
    most_slots = max(cell.runs[0].sizes["slot"] for cell in cells)
    few = most_slots <= FEW_SLOTS
    cells_per_row = 2 if few and len(cells) > 1 else 1
    width = COLUMN_WIDTH if few and len(cells) == 1 else FULL_WIDTH
    side = min(0.3 + 0.3 * most_slots, (width - BAR_WIDTH) / (2 * cells_per_row) - NAME_LENGTH / 2)
    return panel_grid(
        -(-len(cells) // cells_per_row), 2 * cells_per_row, width=width,
        row_height=side + NAME_LENGTH + 0.4, legend_lines=3,
    )  # fmt: skip


def _colour_bar(figure: Figure, grid: NDArray[Any], image: AxesImage) -> None:
    bar = figure.colorbar(image, ax=list(grid.flat), shrink=1 / len(grid), aspect=15)
    bar.set_label("Cosine")
    bar.set_ticks([-1, 0, 1])
    bar.outline.set_visible(False)


def _note(cells: Sequence[Cell]) -> str:
    several = any(len(cell.runs) > 1 for cell in cells)
    average = " Means over seeds." if several else ""
    return f"Products and squared norms of the slots' gradients, summed over the steps of a window.{average}"


def _span(cell: Cell, window: str) -> str:
    """Returns the steps of a window in words; of runs of different lengths only which part it is."""
    spans = {(steps[0], steps[-1]) for steps in (window_steps(run, window) for run in cell.runs)}
    if len(spans) > 1:
        return f"{window} steps"
    first, last = spans.pop()
    return f"Steps {first} to {last}"


def _heat_map(axes: Axes, mean: xr.DataArray, *, named: bool) -> AxesImage:
    """Draws cosines as colours, with the number in each field."""
    image = axes.imshow(
        np.ma.masked_invalid(mean.values), cmap=COLOURS, vmin=-1, vmax=1, interpolation="nearest"
    )
    for (row, column), value in np.ndenumerate(mean.values):
        if np.isfinite(value):
            number = axes.text(
                column, row, _number(value), ha="center", va="center", fontsize=7,
                color="white" if abs(value) >= DARK else "black",
            )  # fmt: skip
            number.set_in_layout(False)  # it lies within its panel, and there are many
    names = [str(name) for name in mean["slot"].values]
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names if named else [])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return image


def _number(value: float) -> str:
    """Returns a cosine in as few characters as two digits allow: `.35`, `-.07`, `1`."""
    text = f"{value:.2f}".replace("0.", ".")
    return {"1.00": "1", "-1.00": "-1", ".00": "0", "-.00": "0"}.get(text, text)


def _hatch_blanks(axes: Axes, mean: xr.DataArray, cell: Cell) -> set[str]:
    """Hatches fields without a number by the reason, and returns which reasons there were."""
    owner = names(cell.runs[0], "slot_policy")
    seen = set()
    for row, column in np.argwhere(np.isnan(mean.values)):
        reason = NO_SIGNAL if owner[row] == owner[column] else NOT_APPLICABLE
        patch = _patches()[reason]
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, facecolor="white", edgecolor="0.6", linewidth=0,
                hatch=patch.get_hatch(), label=f"_{reason}",
            )
        )  # fmt: skip
        seen.add(reason)
    return seen


def _patches() -> dict[str, Patch]:
    hatches = {NOT_APPLICABLE: "/////", NO_SIGNAL: "....."}
    return {
        name: Patch(facecolor="white", edgecolor="0.6", linewidth=0, hatch=hatch, label=name)
        for name, hatch in hatches.items()
    }


def _mean_cosine(per_run: Sequence[xr.Dataset]) -> xr.Dataset:
    """Returns the cosines of one run, or their means where enough of several runs have one."""
    band = over_runs([run["cosine"] for run in per_run])
    return band[["mean", "num_runs"]].rename(mean="cosine")


def _table(cell: Cell, window: str, per_run: Sequence[xr.Dataset]) -> pd.DataFrame:
    """Returns every seed's cosines and, with several seeds, their means."""
    frames = []
    named = [
        (run.assign(num_runs=1), {"drawn_as": "run", "seed": seed})
        for run, seed in zip(per_run, cell.seeds, strict=True)
    ]
    if len(per_run) > 1:
        named.append((_mean_cosine(per_run), {"drawn_as": "mean", "seed": ""}))
    for measures, columns in named:
        frame = measures.to_dataframe().reset_index().rename(columns={"cosine": "value"})
        for place, (name, text) in enumerate({"cell": cell.name, "window": window, **columns}.items()):
            frame.insert(place, name, text)
        frames.append(frame)
    return stack(frames)
