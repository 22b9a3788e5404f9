"""Figure: how far parallel copies of one role push the same way, and how much that amplifies their sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.typing import LineStyleType

from gradscope import derive
from gradscope.figures.base import Drawing, NothingToDrawError, stack
from gradscope.figures.cells import Cell
from gradscope.figures.lines import draw_reference, draw_series, series_note
from gradscope.figures.measures import cells_with_gradients, copies
from gradscope.figures.panels import (
    axis_label,
    legend_below,
    panel_grid,
    reference_handle,
    role_handles,
    settle_layout,
    step_axis,
    title_row,
)
from gradscope.figures.style import FULL_WIDTH, REFERENCE_COLOUR, Look, paper_style, role_looks

ORTHOGONAL: LineStyleType = ":"
ALIGNED: LineStyleType = "--"


def draw(runs: Sequence[xr.DataTree]) -> Drawing:
    """Coherence and gradient amplification of a role's copies, between the orthogonal and the aligned line.

    Copies are slots of one role that train one policy. The orthogonal line of the amplification follows the
    copies' norms at each step; it is sqrt N where they are equal.

    Raises:
        NothingToDrawError: No run has gradients, or no role has two slots on one policy.
        DataError: A run is given twice.
    """
    panels = [(cell, *pair) for cell in cells_with_gradients(runs) for pair in copies(cell)]
    if not panels:
        raise NothingToDrawError(
            "no role has two or more slots that train one policy, so there are no copies."
        )
    panels = [panel for panel in panels if _is_measured(*panel)]
    if not panels:
        raise NothingToDrawError("copies share a policy, but no products of their gradients are in the runs.")
    looks = role_looks(role for cell, *_ in panels for role in cell.roles)
    with paper_style():
        figure, grid = panel_grid(
            len(panels), 2, width=FULL_WIDTH, row_height=1.75, legend_lines=3, sharex=True
        )
        tables = []
        for row, (cell, policy, role) in enumerate(panels):
            per_run = [derive.copy_measures(run, policy, role) for run in cell.runs]
            tables += [
                _coherence_panel(grid[row, 0], cell, role, per_run, looks[role]),
                _amplification_panel(grid[row, 1], cell, role, per_run, looks[role]),
            ]
            title_row(grid[row], f"{cell.name}, {_number(per_run)} copies of {role}, {cell.size}")
            for axes in grid[row]:
                step_axis(axes, label=row == len(panels) - 1)
        shown = {role: looks[role] for _, _, role in panels}
        lines = [
            reference_handle("orthogonal copies", ORTHOGONAL),
            reference_handle("aligned copies", ALIGNED),
        ]
        legend_below(figure, [*role_handles(shown), *lines], series_note([cell for cell, *_ in panels]))
        settle_layout(figure)
    return Drawing(figure, stack(tables))


def _is_measured(cell: Cell, policy: str, role: str) -> bool:
    """Returns whether a run of the cell holds the products of a role's copies on a policy."""
    return any(bool(derive.copy_measures(run, policy, role)["aligned"].notnull().any()) for run in cell.runs)


def _coherence_panel(
    axes: Axes, cell: Cell, role: str, per_run: Sequence[xr.Dataset], look: Look
) -> pd.DataFrame:
    columns = {"cell": cell.name, "role": role, "quantity": "coherence"}
    measured = [measures["coherence"] for measures in per_run]
    # A mean of cosines, weighted by the copies' norms.
    table = draw_series(axes, cell, measured, look, label=role, columns=columns, limits=(-1.0, 1.0))
    axes.axhline(0.0, color=REFERENCE_COLOUR, linestyle=ORTHOGONAL, linewidth=1.0, label="_orthogonal")
    axes.axhline(1.0, color=REFERENCE_COLOUR, linestyle=ALIGNED, linewidth=1.0, label="_aligned")
    # Bands of two or three seeds reach far; the axis follows the data.
    lowest = min(float(np.nanmin([*series.values, 0.0])) for series in measured)
    axes.set_ylim(lowest - 0.08, 1.08)
    axes.set_ylabel(axis_label(measured[0].attrs, "coherence"))
    return table


def _amplification_panel(
    axes: Axes, cell: Cell, role: str, per_run: Sequence[xr.Dataset], look: Look
) -> pd.DataFrame:
    columns = {"cell": cell.name, "role": role, "quantity": "gradient_amplification"}
    measured = [measures["amplification"] for measures in per_run]
    limits = (0.0, float(_number(per_run)))
    tables = [draw_series(axes, cell, measured, look, label=role, columns=columns, limits=limits)]
    for name, dashes in (("orthogonal", ORTHOGONAL), ("aligned", ALIGNED)):
        expected = [measures[name] for measures in per_run]
        tables.append(
            draw_reference(axes, cell, expected, name=name, label=f"_{name}", columns=columns, dashes=dashes)
        )
    axes.set_ylim(0, 1.08 * _number(per_run))
    axes.set_ylabel(axis_label(measured[0].attrs, "gradient amplification"))
    return stack(tables)


def _number(per_run: Sequence[xr.Dataset]) -> int:
    """Returns the largest number of copies at any step."""
    return int(np.nanmax([float(measures["aligned"].max()) for measures in per_run]))
