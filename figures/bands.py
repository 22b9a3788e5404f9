"""Means, 95 % intervals and smoothing of series over steps: arrays and xarray in, xarray out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from scipy.special import stdtrit

SMOOTHING = 9
"""Steps in the running mean."""
SHORTEST_SMOOTHED = 4 * SMOOTHING
"""A run with fewer steps is drawn as it is."""


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

    Interval: mean -+ t s / sqrt(n), the 97.5 % quantile of Student's t with n - 1 degrees of freedom. The
    steps are the union of the runs' steps. One run has no interval. With more, a step at which fewer than two
    have a value is NaN, since a lone run would pass for the mean, and so is the interval where fewer than
    three of three or more have one, since two runs of many would make it jump.
    """
    joined = xr.concat(list(series), dim="run", join="outer", coords="minimal", compat="override")
    count = joined.notnull().sum("run")
    fewest = min(2, len(series))
    mean = joined.mean("run").where(count >= fewest)
    deviation = joined.std("run", ddof=1) if len(series) > 1 else xr.full_like(mean, np.nan)
    quantile = xr.apply_ufunc(stdtrit, (count - 1).clip(min=1).astype(float), 0.975)
    half = (quantile * deviation / np.sqrt(count.clip(min=1))).where(count >= max(2, min(3, len(series))))
    return xr.Dataset({"mean": mean, "low": mean - half, "high": mean + half, "num_runs": count})
