"""Series of Gram matrices as detectors take them: checked, and without steps that say nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.errors import SchemaError
from gradscope.stats.arrays import real_array

Array = NDArray[np.float64]

ROUNDING = 1e-6
"""Part of the product of two norms by which a product may be off."""
SMALLEST_SHARE = 1e-6
"""Shares are kept this far from 0 and 1 before a logit is taken."""


def checked_grams(grams: ArrayLike, *, name: str, least: int) -> Array:
    """Returns Gram matrices as float64 `[T, N, N]`; NaN stands for what is missing.

    Args:
        grams: What the caller gave.
        name: What the caller calls it, for the message.
        least: Smallest N that makes sense.

    Raises:
        SchemaError: It is not `[T, N, N]`, N is too small, or a matrix holds no products of real vectors.
    """
    array = real_array(grams, name=name)
    if array.ndim != 3 or array.shape[1] != array.shape[2]:
        raise SchemaError(f"{name} has shape {array.shape}: expected one square matrix a step, [T, N, N].")
    if array.shape[1] < least:
        raise SchemaError(
            f"{name} has shape {array.shape}: there must be at least {least} gradients to compare."
        )
    fault = gram_fault(array)
    if fault:
        row, first, second, complaint = fault
        raise SchemaError(
            f"{name}[{row}, {first}, {second}] is {complaint}: each matrix must hold the products of real "
            "vectors; use NaN for what is missing or overflowed."
        )
    return array


def gram_fault(grams: Array) -> tuple[int, int, int, str] | None:
    """Returns where and why `[T, N, N]` cannot hold products of gradients; None where it can.

    NaN is no fault: it stands for what is missing.
    """
    squares = np.diagonal(grams, axis1=1, axis2=2)
    sizes = np.sqrt(np.where(np.isfinite(squares) & (squares >= 0), squares, np.nan))
    largest = sizes[:, :, None] * sizes[:, None, :]
    finite = np.where(np.isfinite(grams), grams, 0.0)
    both = np.isfinite(grams) & np.isfinite(grams.transpose(0, 2, 1))
    difference = np.where(both, np.abs(finite - finite.transpose(0, 2, 1)), 0.0)
    faults = (
        (np.isinf(grams), "an infinite product"),
        (
            (grams < 0) & np.eye(grams.shape[1], dtype=bool),
            "a negative squared norm",
        ),
        (difference > ROUNDING * largest, "a product that differs from its mirror image"),
        (
            np.abs(finite) > (1.0 + ROUNDING) * largest,
            "a product larger than the two norms allow",
        ),
    )
    for broken, complaint in faults:
        if broken.any():
            row, first, second = (int(place) for place in np.argwhere(broken)[0])
            return row, first, second, complaint
    return None


def checked_steps(step: ArrayLike | None, num_steps: int) -> Array | None:
    """Returns the steps of the rows as `[T]`.

    Raises:
        SchemaError: Their number differs from the rows', or they do not increase.
    """
    if step is None:
        return None
    steps = real_array(step, name="step")
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
