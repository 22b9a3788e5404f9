"""Evaluation curves with a known cliff, and healthy ones that look like it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FALLING = ("sudden", "ramp", "partial", "late", "partial_recovery")
"""Curves that end in a cliff."""
STEADY = ("plateau", "slow_rise", "slow_decay", "dip", "jitter", "lucky_peak")
"""Curves that do not."""


@dataclass(frozen=True)
class Curve:
    """Evaluations of one run.

    Attributes:
        num_correct: `[T]`.
        num_total: Problems of each evaluation.
        onset: First evaluation of the planted cliff; None where there is none.
        accuracy: True accuracy behind the counts, `[T]`.
    """

    num_correct: NDArray[np.int64]
    num_total: int
    onset: int | None
    accuracy: Array


def accuracy_curve(
    kind: str, *, length: int, num_total: int, generator: np.random.Generator, jitter: float = 0.0
) -> Curve:
    """Returns a curve of that kind: a rise to a plateau, the kind's own shape, scatter and sampling.

    Args:
        kind: One of `FALLING` or `STEADY`.
        length: Evaluations, at least 9.
        num_total: Problems of each.
        generator: Source of all randomness.
        jitter: Standard deviation of the checkpoints' true accuracy around the shape.
    """
    time = np.arange(length)
    start, top = generator.uniform(0.2, 0.5), generator.uniform(0.5, 0.9)
    pace = length * generator.uniform(0.05, 0.25)
    accuracy = top - (top - start) * np.exp(-time / pace)
    onset: int | None = None
    if kind in FALLING:
        loss, onset = _fall(kind, length, top, generator)
        accuracy = accuracy - loss
    elif kind == "slow_rise":
        accuracy = start + (top - start) * time / length
    elif kind == "slow_decay":
        peak = int(length * generator.uniform(0.2, 0.5))
        accuracy = accuracy - generator.uniform(0.02, 0.06) * np.clip(time - peak, 0, None) / (length - peak)
    elif kind == "dip":
        middle, width = length * generator.uniform(0.3, 0.65), length * generator.uniform(0.03, 0.08)
        accuracy = accuracy - generator.uniform(0.05, 0.3) * np.exp(-0.5 * ((time - middle) / width) ** 2)
    elif kind == "jitter":
        jitter = max(jitter, generator.uniform(0.01, 0.025))
    elif kind == "lucky_peak":
        accuracy[generator.integers(length // 3, length - 1)] += generator.uniform(0.03, 0.08)
    true = np.clip(accuracy + jitter * generator.standard_normal(length), 0.001, 0.999)
    return Curve(generator.binomial(num_total, true), num_total, onset, true)


def _fall(kind: str, length: int, top: float, generator: np.random.Generator) -> tuple[Array, int]:
    """Returns what the cliff takes from the accuracy, `[T]`, and its first evaluation."""
    onset = int(length * generator.uniform(0.5, 0.85))
    depth = generator.uniform(0.1, 0.4)
    if kind == "late":
        onset = length - int(generator.integers(2, 4))
    since = np.clip(np.arange(length) - onset + 1, 0, None)
    if kind == "ramp":
        return min(depth, top - 0.05) * np.minimum(
            1.0, since / (length * generator.uniform(0.05, 0.15))
        ), onset
    if kind == "partial":
        depth = generator.uniform(0.05, 0.1)
    loss: Array = min(depth, top - 0.05) * (since > 0).astype(np.float64)
    if kind == "partial_recovery":
        loss = loss * (1.0 - generator.uniform(0.2, 0.5) * np.minimum(1.0, since / (length - onset)))
    return loss, onset
