"""How often a run's own steps, in another order, show as large a change: a null that wanders like the run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_ORDERS = 499
SEED = 0
"""The same data always give the same answer."""
BLOCK = 5
"""Neighbouring steps that stay together at least, in runs long enough for twenty such blocks."""
FEWEST_BLOCKS = 20
SMALLEST_SCATTER = 1e-9
CHUNK = 1_000_000
"""Numbers held at once."""


def chance(series: Array, change: Callable[[Array, Array], Array], num_base: int, num_final: int) -> float:
    """Returns how often the steps in random order show at least as large a change, 1/500 to 1.

    A circular permutation of blocks of neighbouring steps, so that levels which wander within a block do so
    also in the null; a block is as long as the residuals of the series stay correlated. Levels that wander
    over a good part of the run cannot be told from a change.

    Args:
        series: `[C, T]`, without missing values.
        change: From the columns' values in the first and last part, `[..., C, B]` and `[..., C, F]`, the
            size of the change, `[...]`.
        num_base: Steps of the first part, B.
        num_final: Steps of the last part, F.
    """
    num_steps = series.shape[1]
    observed = float(change(series[:, :num_base], series[:, num_steps - num_final :]))
    generator = np.random.default_rng(SEED)
    block = block_length(series)
    per_chunk = max(1, CHUNK // (series.shape[0] * (num_base + num_final)))
    as_large = 0
    for start in range(0, NUM_ORDERS, per_chunk):
        orders = block_orders(num_steps, block, min(per_chunk, NUM_ORDERS - start), generator)
        base, final = (
            series[:, part].swapaxes(0, 1) for part in (orders[:, :num_base], orders[:, -num_final:])
        )
        as_large += int((change(base, final) >= observed - 1e-12).sum())
    return (1 + as_large) / (1 + NUM_ORDERS)


def contrast(base: Array, final: Array) -> Array:
    """Returns by how many standard deviations the mean of the last axis is higher in `final`, `[...]`.

    Divided by the scatter within both parts: an order that mixes two levels scatters, the true one does not.
    """
    scatter = np.sqrt(base.var(axis=-1) + final.var(axis=-1))
    return (final.mean(axis=-1) - base.mean(axis=-1)) / np.maximum(scatter, SMALLEST_SCATTER)


def block_length(series: Array) -> int:
    """Returns how many neighbouring steps of `[C, T]` hang together, in the column where most do.

    1.5 times the integrated autocorrelation time (its estimate is low in short series), less 1, of what is
    left when one step change is taken out: with that left in, every change would count as memory.
    """
    num_steps = series.shape[1]
    shortest = min(BLOCK, max(1, num_steps // FEWEST_BLOCKS))
    return min(num_steps, max(shortest, *(int(np.ceil(1.5 * _memory(column) - 1.0)) for column in series)))


def block_orders(num_steps: int, block: int, num: int, generator: np.random.Generator) -> NDArray[np.intp]:
    """Returns orders of the steps, `[num, T]`: cut into blocks from a random place on, blocks shuffled."""
    starts = np.arange(0, num_steps, block)
    ranks = generator.random((num, starts.size))
    position = np.arange(num_steps)
    # A stable sort by the rank of a step's block keeps the order inside blocks.
    orders = np.argsort(ranks[:, position // block], axis=1, kind="stable")
    return (orders + generator.integers(num_steps, size=(num, 1))) % num_steps


def _memory(column: Array) -> float:
    """Returns the integrated autocorrelation time of `[T]` beside its best single step, at least 1."""
    counts = np.arange(1, column.size)
    left = np.cumsum(column)[:-1]
    right = column.sum() - left
    split = int(np.argmax(left**2 / counts + right**2 / counts[::-1])) + 1
    residual = np.concatenate([part - part.mean() for part in (column[:split], column[split:])])
    size = 2 ** int(np.ceil(np.log2(2 * residual.size)))
    spectrum = np.abs(np.fft.rfft(residual, size)) ** 2
    covariance = np.fft.irfft(spectrum, size)[: residual.size]
    if covariance[0] <= 1e-12 * max(1.0, float((column**2).sum())):
        return 1.0
    correlation = covariance / covariance[0]
    # Geyer 1992 (Statistical Science 7): sum while neighbouring pairs stay positive.
    pairs = correlation[: correlation.size // 2 * 2].reshape(-1, 2).sum(axis=1)
    positive = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else pairs.size
    return max(1.0, float(2.0 * pairs[:positive].sum() - 1.0))
