"""Figure: each role's share of a shared policy's gradient, as energy and as norm, and what counts predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import xarray as xr
from matplotlib.axes import Axes

from gradscope import derive
from gradscope.figures.base import Drawing, NothingToDrawError, stack
from gradscope.figures.cells import Cell
from gradscope.figures.lines import draw_reference, draw_series, series_note
from gradscope.figures.measures import cells_with_gradients, shared_policies
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
from gradscope.figures.style import FULL_WIDTH, Look, paper_style, role_looks

SHARES = ("energy", "norm")
BY_COUNTS = "counts only"


def draw(runs: Sequence[xr.DataTree]) -> Drawing:
    """Energy share and norm share of each role of a shared policy, with what counts alone predict (dashed).

    Steps without signal have no shares and stay blank.

    Raises:
        NothingToDrawError: No run has gradients, or no policy is shared by several roles.
        DataError: A run is given twice.
    """
    panels = [(cell, policy) for cell in cells_with_gradients(runs) for policy in shared_policies(cell)]
    if not panels:
        raise NothingToDrawError(
            "no policy of these runs is shared by two or more roles, so there is nothing to share. "
            "Give a run with policy.routing=shared."
        )
    looks = role_looks(role for cell, _ in panels for role in cell.roles)
    with paper_style():
        figure, grid = panel_grid(
            len(panels),
            len(SHARES),
            width=FULL_WIDTH,
            row_height=1.75,
            legend_lines=3,
            sharex=True,
            sharey=True,
        )
        tables = []
        for row, (cell, policy) in enumerate(panels):
            per_run = [derive.role_shares(run, policy) for run in cell.runs]
            for axes, share in zip(grid[row], SHARES, strict=True):
                tables.append(_panel(axes, cell, policy, share, per_run, looks))
                step_axis(axes, label=row == len(panels) - 1)
                axes.set_ylabel(axis_label(per_run[0][share].attrs, f"{share} share"))
            several = len(derive.policies(cell.runs[0])) > 1
            title_row(grid[row], f"{cell.name}, {cell.size}" + (f", policy {policy}" if several else ""))
        grid[0, 0].set_ylim(0, 1)
        table = stack(tables)
        handles = role_handles(looks)
        if table["value"][table["drawn_as"] == BY_COUNTS].notna().any():
            handles.append(reference_handle("expected from counts alone", "--"))
        legend_below(figure, handles, series_note([cell for cell, _ in panels]))
        settle_layout(figure)
    return Drawing(figure, table)


def _panel(
    axes: Axes,
    cell: Cell,
    policy: str,
    share: str,
    per_run: Sequence[xr.Dataset],
    looks: Mapping[str, Look],
) -> pd.DataFrame:
    tables = []
    for role in per_run[0]["role"].values:
        columns = {"cell": cell.name, "policy": policy, "role": str(role), "quantity": f"{share}_share"}
        measured = [shares[share].sel(role=role) for shares in per_run]
        look = looks[str(role)]
        tables.append(
            draw_series(axes, cell, measured, look, label=str(role), columns=columns, limits=(0.0, 1.0))
        )
        if all(f"expected_{share}" in shares for shares in per_run):
            expected = [shares[f"expected_{share}"].sel(role=role) for shares in per_run]
            tables.append(
                draw_reference(
                    axes, cell, expected, name=BY_COUNTS, label=f"_expected_{role}", columns=columns,
                    colour=look.colour,
                )
            )  # fmt: skip
    return stack(tables)
