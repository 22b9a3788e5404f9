"""Intervals of proportions and of their differences, from counts."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson_interval(num_correct: float, num_total: float, *, z: float = Z_95) -> tuple[float, float]:
    """Returns the score interval of a proportion (Wilson 1927, JASA 22), at 95 % by default."""
    share, shrink = num_correct / num_total, 1.0 + z * z / num_total
    centre = (share + z * z / (2 * num_total)) / shrink
    spread = z / shrink * math.sqrt(share * (1 - share) / num_total + z * z / (4 * num_total**2))
    return max(0.0, centre - spread), min(1.0, centre + spread)


def difference_interval(
    before: tuple[float, float], after: tuple[float, float], *, z: float = Z_95
) -> tuple[float, float]:
    """Returns the interval of `after` minus `before`, each (correct, total).

    Newcombe 1998 (Statistics in Medicine 17), method 10: the two score intervals combined. The two are taken
    as independent; where the same problems were used for both it is wider than it need be.
    """
    p1, p2 = before[0] / before[1], after[0] / after[1]
    low1, high1 = wilson_interval(*before, z=z)
    low2, high2 = wilson_interval(*after, z=z)
    difference = p2 - p1
    return (
        difference - math.hypot(p2 - low2, high1 - p1),
        difference + math.hypot(high2 - p2, p1 - low1),
    )
