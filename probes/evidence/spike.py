"""When a gradient norm jumps above its own recent history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from gradscope.warner import robust_deviation

MEMORY = 50
"""Updates that a norm is compared with."""
FEWEST = 10
"""Updates before anything is judged."""
DEVIATIONS = 5.0
"""Robust standard deviations above the median."""
FACTOR = 2.0
"""And times the median: a history that hardly scatters makes nothing of a small change."""


def is_spike(log_norms: Sequence[float], log_norm: float) -> bool:
    """Returns whether a log norm stands out above those of the updates before it.

    Args:
        log_norms: The history, newest last; values that are not finite do not count.
        log_norm: The log norm now; one that is not a number or minus infinity is no spike, infinity is one.
    """
    history = [value for value in log_norms if math.isfinite(value)][-MEMORY:]
    if len(history) < FEWEST or math.isnan(log_norm):
        return False
    if log_norm - float(np.median(history)) < math.log(FACTOR):
        return False
    return bool(robust_deviation(np.array(history), log_norm) > DEVIATIONS)


class SpikeWatch:
    """The recent log norms of one policy's updates."""

    def __init__(self) -> None:
        self._history: deque[float] = deque(maxlen=MEMORY)

    def state(self) -> list[float]:
        """Returns the log norms that are remembered."""
        return list(self._history)

    def load(self, log_norms: Iterable[float]) -> None:
        """Goes on from what `state` returned."""
        self._history = deque(log_norms, maxlen=MEMORY)

    def update(self, norm: float) -> bool:
        """Takes the gradient norm of an update; returns whether it is a spike."""
        log_norm = math.log(norm) if norm > 0 else math.nan if math.isnan(norm) else -math.inf
        spike = is_spike(tuple(self._history), log_norm)
        if math.isfinite(log_norm):
            self._history.append(log_norm)
        return spike
