"""Series of Gram matrices as detectors take them: checked, and without steps that say nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.errors import SchemaError

Array = NDArray[np.float64]

SMALLEST_SHARE = 1e-6
"""Shares are kept this far from 0 and 1 before a logit is taken."""


def checked_grams(grams: ArrayLike, *, name: str, least: int) -> Array:
    """Returns Gram matrices as float64 `[T, N, N]`, with what is not finite as NaN.

    Args:
        grams: What the caller gave.
        name: What the caller calls it, for the message.
        least: Smallest N that makes sense.

    Raises:
        SchemaError: It is not `[T, N, N]`, N is too small, or a squared norm is negative.
    """
    try:
        array = np.asarray(grams, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{name} must be an array of numbers: {error}.") from error
    if array.ndim != 3 or array.shape[1] != array.shape[2]:
        raise SchemaError(f"{name} has shape {array.shape}: expected one square matrix a step, [T, N, N].")
    if array.shape[1] < least:
        raise SchemaError(
            f"{name} has shape {array.shape}: there must be at least {least} gradients to compare."
        )
    diagonals = np.diagonal(array, axis1=1, axis2=2)
    if (diagonals < 0).any():
        row, column = np.argwhere(diagonals < 0)[0]
        raise SchemaError(f"{name}[{row}, {column}, {column}] is negative: a diagonal holds squared norms.")
    return np.where(np.isfinite(array), array, np.nan)


def checked_steps(step: ArrayLike | None, num_steps: int) -> Array | None:
    """Returns the steps of the rows as `[T]`.

    Raises:
        SchemaError: Their number differs from the rows', or they do not increase.
    """
    if step is None:
        return None
    steps = np.asarray(step, dtype=np.float64)
    if steps.shape != (num_steps,):
        raise SchemaError(f"step has shape {steps.shape}, expected ({num_steps},): one step a row.")
    if not (np.isfinite(steps).all() and (np.diff(steps) > 0).all()):
        raise SchemaError("step must be finite and increase from row to row: sort the rows by step first.")
    return steps


def logit(share: Array) -> Array:
    """Returns the log odds of a share, finite also at 0 and 1; NaN stays NaN."""
    inside = np.clip(share, SMALLEST_SHARE, 1.0 - SMALLEST_SHARE)
    return np.log(inside) - np.log1p(-inside)


def complete(grams: Array) -> Array:
    """Returns `[T, N, N]` with every step as NaN in which a gradient is missing or all are 0."""
    squares = np.diagonal(grams, axis1=1, axis2=2)
    usable = np.isfinite(squares).all(axis=1) & (squares.sum(axis=1) > 0)
    return np.where(usable[:, None, None], grams, np.nan)
