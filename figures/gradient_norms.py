"""Figure: each role's gradient norm by step on a log axis, isolated beside shared policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import xarray as xr
from matplotlib.axes import Axes

from gradscope.figures.base import Drawing, stack
from gradscope.figures.cells import Cell
from gradscope.figures.lines import draw_series, series_note
from gradscope.figures.measures import cells_with_gradients, role_norms
from gradscope.figures.panels import (
    axis_label,
    legend_below,
    log_axis,
    panel_grid,
    panel_title,
    role_handles,
    settle_layout,
    step_axis,
)
from gradscope.figures.style import COLUMN_WIDTH, FULL_WIDTH, Look, paper_style, role_looks


def draw(runs: Sequence[xr.DataTree]) -> Drawing:
    """Per-role gradient norms by step (log axis), isolated beside shared policies.

    A role's gradient is the sum over its slots, unclipped; over several updates of a step, squares add.

    Raises:
        NothingToDrawError: No run has gradients.
        DataError: A run is given twice.
    """
    cells = cells_with_gradients(runs)
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    rows = [[cell for cell in cells if cell.setting == setting] for setting in settings]
    num_columns = max(map(len, rows))
    looks = role_looks(role for cell in cells for role in cell.roles)
    with paper_style():
        figure, grid = panel_grid(
            len(rows), num_columns, width=FULL_WIDTH if num_columns > 1 else COLUMN_WIDTH, row_height=1.75,
            legend_lines=3 if num_columns > 1 else 5, sharex=True, sharey="row",
        )  # fmt: skip
        tables = []
        for row, members in enumerate(rows):
            for column, (axes, cell) in enumerate(zip(grid[row], members, strict=False)):
                tables.append(_panel(axes, cell, looks))
                panel_title(axes, f"{cell.name}, {cell.size}", num_columns=num_columns)
                step_axis(axes, label=all(len(below) <= column for below in rows[row + 1 :]))
            grid[row, 0].set_ylabel(axis_label(role_norms(members[0].runs[0]).attrs, "gradient norm"))
            drawn = stack(tables[-len(members) :])
            log_axis(grid[row, 0], drawn["value"][drawn["drawn_as"] == "dots"].to_numpy())
            for axes in grid[row, len(members) :]:
                axes.set_axis_off()
        legend_below(figure, role_handles(looks), series_note(cells, mean="geometric mean"))
        settle_layout(figure)
    return Drawing(figure, stack(tables))


def _panel(axes: Axes, cell: Cell, looks: Mapping[str, Look]) -> pd.DataFrame:
    norms = [role_norms(run) for run in cell.runs]
    tables = []
    for role in cell.roles:
        columns = {"cell": cell.name, "role": role, "quantity": "gradient_norm"}
        measured = [norm.sel(role=role) for norm in norms]
        tables.append(
            draw_series(axes, cell, measured, looks[role], label=role, columns=columns, logarithmic=True)
        )
    return stack(tables)
