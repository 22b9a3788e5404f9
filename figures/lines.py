"""Draws one quantity of one cell over steps: dots as measured, a smoothed line, a band over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.typing import LineStyleType

from gradscope.figures.bands import SHORTEST_SMOOTHED, band_words, over_runs, smooth, window_for
from gradscope.figures.base import stack
from gradscope.figures.cells import Cell
from gradscope.figures.style import BAND_OPACITY, REFERENCE_COLOUR, Look

MANY_DOTS = 2000
"""From this many dots on they are pixels inside the PDF, so that it opens quickly."""
NUM_MARKERS = 6
"""Markers along a line, besides those at steps without a neighbour."""


def draw_series(
    axes: Axes,
    cell: Cell,
    per_run: Sequence[xr.DataArray],
    look: Look,
    *,
    label: str,
    columns: Mapping[str, str],
    logarithmic: bool = False,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> pd.DataFrame:
    """Draws a quantity of a cell's runs and returns the drawn numbers.

    Dots are the runs' values, the line their running means averaged over runs, bands as in `over_runs`.
    On a log axis means are taken of logs, and a value of 0, which has no place there, is blank.

    Args:
        axes: Where to draw.
        cell: The runs.
        per_run: One series on dim `step` a run, NaN where there is no value.
        look: Colour and marker.
        label: Of the line.
        columns: Columns of the table that say what this is.
        logarithmic: Whether the axis is logarithmic.
        limits: Values that the quantity cannot leave; its band is cut off there.
    """
    if logarithmic:
        per_run = [series.where(series > 0) for series in per_run]
    dots = [
        _draw_dots(axes, series, look, seed=seed, columns=columns)
        for series, seed in zip(per_run, cell.seeds, strict=True)
    ]
    window = smoothing_window(cell)
    line = over_runs([smooth(_log(series) if logarithmic else series, window) for series in per_run])
    mean, low, high = (_exp(line[name]) if logarithmic else line[name] for name in ("mean", "low", "high"))
    low, high = low.clip(*limits), high.clip(*limits)
    axes.plot(
        line["step"], mean, color=look.colour, marker=look.marker, label=label, markevery=_marked(mean.values)
    )
    if len(per_run) > 1:
        axes.fill_between(line["step"], low, high, color=look.colour, alpha=BAND_OPACITY, linewidth=0)
    return stack([*dots, _rows(columns, "line", mean, low=low, high=high, num_runs=line["num_runs"])])


def _draw_dots(
    axes: Axes, series: xr.DataArray, look: Look, *, seed: str, columns: Mapping[str, str]
) -> pd.DataFrame:
    axes.plot(
        series["step"], series, linestyle="none", marker=".", markersize=2.2, markeredgewidth=0,
        color=look.colour, alpha=0.45, label=f"_dots_{seed}", rasterized=series.size > MANY_DOTS,
    )  # fmt: skip
    return _rows(columns, "dots", series, seed=seed)


def draw_reference(
    axes: Axes,
    cell: Cell,
    per_run: Sequence[xr.DataArray],
    *,
    name: str,
    label: str,
    columns: Mapping[str, str],
    colour: str = REFERENCE_COLOUR,
    dashes: LineStyleType = "--",
) -> pd.DataFrame:
    """Draws what a quantity would be under an assumption, smoothed and averaged as the quantity itself."""
    window = smoothing_window(cell)
    line = over_runs([smooth(series, window) for series in per_run])
    axes.plot(
        line["step"], line["mean"], color=colour, linestyle=dashes, linewidth=1.0, label=label,
        marker="_" if dashes == "--" else ".",
        markevery=_lonely(line["mean"].values).tolist(),
    )  # fmt: skip
    return _rows(columns, name, line["mean"], num_runs=line["num_runs"])


def smoothing_window(cell: Cell) -> int:
    """Returns the steps in the running mean of a cell: that of its shortest run, 1 for none."""
    return window_for(min(np.unique(run["updates"].to_dataset()["step"].values).size for run in cell.runs))


def series_note(cells: Sequence[Cell], *, mean: str = "mean") -> str:
    """Returns the sentences of the legend that say what dots, lines and bands are."""
    windows = {smoothing_window(cell) for cell in cells}
    alone = all(len(cell.runs) == 1 for cell in cells)
    if alone and max(windows) == 1:
        return "Every step as measured, nothing smoothed. One seed."
    if max(windows) == 1:
        line = f"Lines: the {mean}, not smoothed"
    else:
        some = f" (where a run has at least {SHORTEST_SMOOTHED})" if min(windows) == 1 else ""
        line = f"Lines: running {mean} over {max(windows)} steps{some}"
    if alone:
        return f"Dots: single steps. {line}. One seed."
    where = " where three or more seeds have values" if max(len(cell.runs) for cell in cells) > 2 else ""
    bands = band_words([len(cell.runs) for cell in cells])
    return f"Dots: single runs. {line}, averaged over seeds; bands: {bands}{where}."


def _marked(values: np.ndarray) -> list[int]:
    """Returns the rows of a line that get a marker: some of those with a value, and all lonely ones."""
    known = np.flatnonzero(np.isfinite(values))
    regular = known[:: max(1, known.size // NUM_MARKERS)]
    return np.union1d(regular, _lonely(values)).tolist()


def _lonely(values: np.ndarray) -> np.ndarray:
    """Returns the rows whose neighbours both have no value, of which a line shows nothing."""
    known = np.pad(np.isfinite(values), 1)
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def _log(series: xr.DataArray) -> xr.DataArray:
    return series.copy(data=np.log(series.values))


def _exp(series: xr.DataArray) -> xr.DataArray:
    return series.copy(data=np.exp(series.values))


def _rows(
    columns: Mapping[str, str],
    drawn_as: str,
    values: xr.DataArray,
    *,
    seed: str = "",
    low: xr.DataArray | None = None,
    high: xr.DataArray | None = None,
    num_runs: xr.DataArray | int = 1,
) -> pd.DataFrame:
    nothing = np.full(values.shape, np.nan)
    return pd.DataFrame(
        {
            **{name: [text] * values.size for name, text in columns.items()},
            "drawn_as": drawn_as,
            "seed": seed,
            "step": values["step"].values,
            "value": values.values,
            "low": nothing if low is None else low.values,
            "high": nothing if high is None else high.values,
            "num_runs": num_runs if isinstance(num_runs, int) else num_runs.values,
        }
    )
