"""Numbers as findings word them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.windows import FEWEST_VALID, SHORTEST, windows_for


def percent(fraction: float) -> str:
    """Returns a fraction as per cent, with a decimal only where it matters."""
    value = 100.0 * fraction
    return f"{value:.0f} %" if abs(value) >= 10 or value == 0 else f"{value:.1f} %"


def points(fraction: float) -> str:
    """Returns a difference of accuracies in points."""
    return f"{100.0 * fraction:.1f} points"


def at_step(step: int | float | None) -> str:
    """Returns `step 120`."""
    return f"step {step:g}" if step is not None else "an unknown step"


def score(value: float) -> str:
    """Returns a score with two decimals, `not available` where there is none."""
    return f"{value:.2f}" if np.isfinite(value) else "not available"


def span(width: float) -> str:
    """Returns which steps were compared and how, from the number of steps in each window."""
    return f"from the first {width:.0f} to the last {width:.0f} steps (medians over those with a gradient)"


def by_chance(chance: float) -> str:
    """Returns how often reordered steps change as much, as a clause."""
    return f"the run's own steps in random order change as much in {percent(chance)} of orders"


def too_few(grams: NDArray[np.float64]) -> str:
    """Returns why two windows of `[T, N, N]` cannot be compared; empty where enough steps have signal."""
    windows = windows_for(grams.shape[0])
    if windows is None:
        return f"{grams.shape[0]} steps are too few: {2 * SHORTEST} are needed"
    alive = np.asarray(np.isfinite(np.diagonal(grams, axis1=1, axis2=2)).all(axis=1))
    if not alive.any():
        return f"no step of {alive.size} had signal"
    base, final = windows.num_usable(alive)
    if min(base, final) >= FEWEST_VALID:
        return ""
    return (
        f"the first {windows.width} steps hold {base} and the last {windows.width} hold {final} with signal: "
        f"{FEWEST_VALID} are needed in both"
    )
