"""A series of evaluations as counts: checked, ordered by step, repeats merged; and how far they scatter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.errors import SchemaError

Array = NDArray[np.float64]

DISPERSION_PRIOR = 8.0
"""Pseudo-observations that pull the dispersion towards the binomial value of 1."""
DISPERSION_FLOOR = 0.3
"""A fixed test set shares its items, so evaluations may scatter less than binomial, but not without limit."""


@dataclass(frozen=True)
class Evaluations:
    """Evaluations in order of step, one for each step.

    Attributes:
        correct: Right answers, `[T]`.
        total: Problems, `[T]`.
        step: Training step, `[T]`; None where the caller gave none.
        source: Position of each evaluation's first row in the caller's arrays, `[T]`.
    """

    correct: Array
    total: Array
    step: Array | None
    source: NDArray[np.intp]


def order_evaluations(num_correct: ArrayLike, num_total: ArrayLike, step: ArrayLike | None) -> Evaluations:
    """Returns the evaluations by step; repeats at one step are merged.

    Rows that agree in step, correct and total are one evaluation written more than once. Rows that agree
    only in step are independent samples of it and are pooled: sum of correct, sum of total.

    Args:
        num_correct: `[E]`, whole numbers.
        num_total: `[E]`, or anything that broadcasts to it; whole numbers of at least 1.
        step: `[E]` in any order, or None when the rows already stand in order.

    Raises:
        SchemaError: Shapes do not fit, or a count or step is not usable.
    """
    correct, total = _checked_counts(num_correct, num_total)
    if step is None:
        return Evaluations(correct, total, None, np.arange(correct.size))
    steps = np.asarray(step, dtype=np.float64)
    if steps.shape != correct.shape:
        raise SchemaError(f"step has shape {steps.shape}, num_correct {correct.shape}: give one step a row.")
    if not np.isfinite(steps).all():
        raise SchemaError(
            f"step[{int(np.argmin(np.isfinite(steps)))}] is not a finite number: drop that row."
        )
    rows = np.stack([steps, correct, total], axis=1)
    _, first = np.unique(rows, axis=0, return_index=True)
    kept = np.sort(first)
    unique_steps, group = np.unique(steps[kept], return_inverse=True)
    source = np.full(unique_steps.size, correct.size, dtype=np.intp)
    np.minimum.at(source, group, kept)
    return Evaluations(
        correct=np.bincount(group, weights=correct[kept]).astype(np.float64),
        total=np.bincount(group, weights=total[kept]).astype(np.float64),
        step=unique_steps,
        source=source,
    )


def dispersion(correct: Array, total: Array) -> Array:
    """Returns how much evaluations scatter beyond binomial sampling (1), over the last axis.

    From the median absolute deviation of the successive differences of the arcsine accuracies, so that a
    trend or one break does not count as scatter; shrunk towards 1 and bounded below.
    Checkpoints that jitter give more than 1, the shared items of a fixed test set less.

    Args:
        correct: `[..., T]`, T at least 2.
        total: `[T]`.
    """
    angles = np.arcsin(np.sqrt((correct + 0.375) / (total + 0.75)))
    variance = 1.0 / (4.0 * total + 2.0)
    differences = np.diff(angles, axis=-1) / np.sqrt(variance[1:] + variance[:-1])
    centre = np.median(differences, axis=-1, keepdims=True)
    scatter = (1.4826 * np.median(np.abs(differences - centre), axis=-1)) ** 2
    count = differences.shape[-1]
    return np.maximum(DISPERSION_FLOOR, (DISPERSION_PRIOR + count * scatter) / (DISPERSION_PRIOR + count))


def _checked_counts(num_correct: ArrayLike, num_total: ArrayLike) -> tuple[Array, Array]:
    """Returns both counts as `[E]`, or says which row cannot be a count."""
    try:
        correct = np.asarray(num_correct, dtype=np.float64)
        total = np.asarray(num_total, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"num_correct and num_total must be arrays of numbers: {error}.") from error
    if correct.ndim != 1:
        raise SchemaError(f"num_correct has shape {correct.shape}: give one number for each evaluation, [E].")
    try:
        total = np.broadcast_to(total, correct.shape)
    except ValueError as error:
        raise SchemaError(
            f"num_total has shape {total.shape}, num_correct {correct.shape}: give one total, or one a row."
        ) from error
    rules = [
        (~(np.isfinite(correct) & np.isfinite(total)), "is not a finite number: drop that evaluation"),
        ((correct % 1 != 0) | (total % 1 != 0), "is not whole: give counts of problems, not accuracies"),
        (total < 1, "has no problems: num_total must be at least 1"),
        (correct < 0, "is negative: num_correct must be at least 0"),
        (correct > total, "has more right answers than problems"),
    ]
    for broken, complaint in rules:
        if broken.any():
            row = int(np.argmax(broken))
            raise SchemaError(f"evaluation {row} ({correct[row]:g} of {total[row]:g}) {complaint}.")
    return correct, total.copy()
