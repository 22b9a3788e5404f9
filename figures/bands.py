"""Means, bands over seeds and smoothing of series over steps: arrays and xarray in, xarray out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from scipy.special import stdtrit

SMOOTHING = 9
"""Steps in the running mean."""
SHORTEST_SMOOTHED = 4 * SMOOTHING
"""A run with fewer steps is drawn as it is."""
FEWEST_FOR_INTERVAL = 5
"""Runs from which a 95 % interval is drawn; that of fewer is so wide that it hides what it is about."""


def window_for(num_steps: int) -> int:
    """Returns the steps in the running mean of a run that long: 9, or 1 (none) for a short one."""
    return SMOOTHING if num_steps >= SHORTEST_SMOOTHED else 1


def smooth(series: xr.DataArray, window: int) -> xr.DataArray:
    """Returns the centred running mean over `window` rows, over the values that are there.

    NaN where fewer than half of the rows in the window have a value, so that a stretch without data stays
    empty. At the ends the window is what lies inside the run.
    """
    rolled = series.rolling(step=window, center=True, min_periods=1)
    there = series.notnull().astype(float).rolling(step=window, center=True, min_periods=1).sum()
    inside = xr.ones_like(series).rolling(step=window, center=True, min_periods=1).sum()
    return rolled.mean().where(2 * there >= inside)


def over_runs(series: Sequence[xr.DataArray]) -> xr.Dataset:
    """Returns `mean`, `low`, `high` and `num_runs` over runs at each step, on the dims of the series.

    The band is the range of 2 to 4 runs; of 5 or more it is the interval mean -+ t s / sqrt(n), with the
    97.5 % quantile of Student's t and n - 1 degrees of freedom. The steps are the union of the runs' steps.
    One run has no band. With more, a step at which fewer than half of them (or fewer than two) have a value
    is NaN, since a few runs would pass for all and the mean would jump; so is the band where fewer than three
    of three or more have one.
    """
    joined = xr.concat(list(series), dim="run", join="outer", coords="minimal", compat="override")
    count = joined.notnull().sum("run")
    fewest = min(len(series), max(2, -(-len(series) // 2)))
    mean = joined.mean("run").where(count >= fewest)
    enough = count >= max(2, fewest, min(3, len(series)))
    if len(series) < FEWEST_FOR_INTERVAL:
        low, high = joined.min("run"), joined.max("run")
    else:
        quantile = xr.apply_ufunc(stdtrit, (count - 1).clip(min=1).astype(float), 0.975)
        half = quantile * joined.std("run", ddof=1) / np.sqrt(count.clip(min=1))
        low, high = mean - half, mean + half
    return xr.Dataset({"mean": mean, "low": low.where(enough), "high": high.where(enough), "num_runs": count})


def band_words(num_runs: Sequence[int]) -> str:
    """Returns what the bands of cells with so many runs are, as a legend says it."""
    kinds = {
        "the seeds' range": any(1 < num < FEWEST_FOR_INTERVAL for num in num_runs),
        "the 95 % interval of the mean": any(num >= FEWEST_FOR_INTERVAL for num in num_runs),
    }
    names = [name for name, there in kinds.items() if there]
    if len(names) < 2:
        return "".join(names)
    return f"{names[0]}, or {names[1]} from {FEWEST_FOR_INTERVAL} seeds"
