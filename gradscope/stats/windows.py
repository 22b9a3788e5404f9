"""First and last part of a per-step series compared, and the step at which it left its first level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FRACTION = 0.2
"""Part of the run in each window."""
SHORTEST = 10
"""Steps in a window at least."""
FEWEST_VALID = 5
"""Steps with a value that a window needs; with fewer it says nothing."""
SMOOTHING = 9
"""Steps in the running mean that places an onset."""
NUM_FEET = 50
"""Ramps that are tried to place an onset."""
NEAR_BASE = 0.2
"""Part of the whole change within which a series still counts as at its first level."""


@dataclass(frozen=True)
class Windows:
    """The first and the last fifth of a run's steps, at least ten steps each.

    Attributes:
        base: Rows of the first window.
        final: Rows of the last window.
    """

    base: slice
    final: slice

    @property
    def width(self) -> int:
        """Steps in each window."""
        return int(self.base.stop)

    def num_usable(self, usable: NDArray[np.bool_]) -> tuple[int, int]:
        """Returns how many steps of each window are usable, by `[T]`."""
        return int(usable[self.base].sum()), int(usable[self.final].sum())

    def medians(self, series: Array) -> tuple[Array, Array]:
        """Returns the medians over each window's values of `[T, ...]`; NaN with fewer than five of them."""
        return _centre(series[self.base], np.median), _centre(series[self.final], np.median)

    def means(self, series: Array) -> tuple[Array, Array]:
        """Returns the means over each window's values of `[T, ...]`; NaN with fewer than five of them."""
        return _centre(series[self.base], np.mean), _centre(series[self.final], np.mean)


def windows_for(num_steps: int) -> Windows | None:
    """Returns the two windows, or None where they would overlap."""
    width = max(SHORTEST, int(np.ceil(FRACTION * num_steps)))
    if 2 * width > num_steps:
        return None
    return Windows(slice(0, width), slice(num_steps - width, num_steps))


def onset(series: Array, *, base: float, final: float) -> int | None:
    """Returns the row at which a series left its base level for its final one.

    A least-squares step lands in the middle of a ramp. So the onset is the foot of the ramp around that
    middle which fits best, of no width at all for a sudden change; it lies no further back than where the
    running mean of nine steps was last near the base level (within a fifth of the whole change).

    Args:
        series: `[T]`, NaN where there is no value.
        base: Level of the first window.
        final: Level of the last window.

    Returns:
        A row of `series`; None with fewer than two values.
    """
    rows = np.flatnonzero(np.isfinite(series))
    values = series[rows]
    if values.size < 2:
        return None
    split = _step_position(values)
    smooth = _running_mean(values)
    near = np.abs(smooth - base) <= NEAR_BASE * abs(final - base)
    before = np.flatnonzero(near[: split + 1])
    furthest = min(int(before[-1]) + 1, split) if before.size else split
    feet = np.unique(np.linspace(furthest, split, NUM_FEET).astype(int))
    time = np.arange(values.size)
    ramps = [np.clip((time - foot + 1) / (2 * (split - foot) + 1), 0.0, 1.0) for foot in feet]
    misfits = [float(((values - base - (final - base) * ramp) ** 2).sum()) for ramp in ramps]
    return int(rows[feet[int(np.argmin(misfits))]])


def _centre(part: Array, statistic: Callable[[Array], np.floating]) -> Array:
    """Returns the statistic of the finite values along axis 0, NaN where there are fewer than five."""
    shape = part.shape[1:]
    columns = part.reshape(part.shape[0], -1)
    centres = np.full(columns.shape[1], np.nan)
    for column in range(columns.shape[1]):
        values = columns[np.isfinite(columns[:, column]), column]
        if values.size >= FEWEST_VALID:
            centres[column] = statistic(values)
    return centres.reshape(shape)


def _step_position(values: Array) -> int:
    """Returns the first index after the best single step: the split that explains most variance."""
    counts = np.arange(1, values.size)
    left = np.cumsum(values)[:-1]
    right = values.sum() - left
    explained = left**2 / counts + right**2 / (values.size - counts)
    return int(np.argmax(explained)) + 1


def _running_mean(values: Array) -> Array:
    """Returns the centred mean over nine values, over what there is at the ends."""
    window = np.ones(min(SMOOTHING, values.size))
    return np.convolve(values, window, mode="same") / np.convolve(np.ones(values.size), window, mode="same")
