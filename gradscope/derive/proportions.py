"""Intervals of proportions and of their differences, from counts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

Z_95 = 1.959963984540054


def wilson_interval(num_correct: ArrayLike, num_total: ArrayLike, *, z: float = Z_95) -> tuple[Array, Array]:
    """Returns the score interval of proportions (Wilson 1927, JASA 22), low and high, each `[...]`.

    At 95 % unless `z` says otherwise; within 0 and 1.
    """
    correct, total = np.asarray(num_correct, dtype=np.float64), np.asarray(num_total, dtype=np.float64)
    share, shrink = correct / total, 1.0 + z**2 / total
    centre = (share + z**2 / (2 * total)) / shrink
    half = z / shrink * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


def difference_interval(
    before: tuple[float, float], after: tuple[float, float], *, z: float = Z_95
) -> tuple[float, float]:
    """Returns the interval of `after` minus `before`, each (correct, total).

    Newcombe 1998 (Statistics in Medicine 17), method 10: the two score intervals combined. The two are taken
    as independent; where the same problems were used for both it is wider than it need be.
    """
    p1, p2 = before[0] / before[1], after[0] / after[1]
    low1, high1 = map(float, wilson_interval(*before, z=z))
    low2, high2 = map(float, wilson_interval(*after, z=z))
    difference = p2 - p1
    return (
        difference - math.hypot(p2 - low2, high1 - p1),
        difference + math.hypot(high2 - p2, p1 - low1),
    )
