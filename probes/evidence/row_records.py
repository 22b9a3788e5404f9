"""From the numbers of measured micro-batches to the rows that an update's record keeps.

Legend: n rows kept, N entries of a micro-batch, R its rows, S numbers of a sketch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradscope.probes.evidence.row_sums import RowNumbers
from gradscope.probes.rows import RowBatch
from gradscope.runfile.evidence import RowEvidence

Array = NDArray[np.float64]


def rows_of_batch(
    batch: RowBatch,
    numbers: RowNumbers,
    slots: Sequence[int],
    *,
    scale: float,
) -> RowEvidence:
    """Returns the rows of some slots in a micro-batch, in order.

    Args:
        batch: The micro-batch; with row ids.
        numbers: What was measured of its rows.
        slots: Numbers of the slots.
        scale: Factor that brings the numbers to the units of the loss.
    """
    starts = numbers.starts
    own = [row for row, start in enumerate(starts) if batch.slot_N[start] in slots]
    assert batch.row_ids is not None
    known = batch.problems or (None,) * len(batch)
    names = ["" if known[start] is None else str(known[start]) for start in starts[own]]
    return RowEvidence(
        row_ids=tuple(str(batch.row_ids[start]) for start in starts[own]),
        slots=tuple(batch.names[batch.slot_N[start]] for start in starts[own]),
        grad_norm=numbers.norms[own] * scale,
        sketch=None if numbers.sketches is None else numbers.sketches[own] * scale,
        problems=tuple(names),
        episodes=("",) * len(own),
        advantages=_largest(batch.numbers.get("advantages"), starts)[own],
        num_tokens=_total(batch.numbers.get("tokens"), starts)[own],
    )


def joined(parts: Sequence[RowEvidence], *, top: int | None) -> RowEvidence:
    """Returns rows one after the other.

    Args:
        parts: Some rows; sketches are kept where all parts have them.
        top: How many of the largest gradient norms are kept, largest first; None keeps all rows in order.
    """
    norms = np.concatenate([part.grad_norm for part in parts])
    # NaN sorts last.
    kept = np.arange(len(norms)) if top is None else np.argsort(-norms, kind="stable")[:top]
    sketches = [part.sketch for part in parts if part.sketch is not None]

    def names(of: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        every = [name for part in of for name in part]
        return tuple(every[place] for place in kept)

    return RowEvidence(
        row_ids=names([part.row_ids for part in parts]),
        slots=names([part.slots for part in parts]),
        grad_norm=norms[kept],
        sketch=np.concatenate(sketches)[kept] if len(sketches) == len(parts) else None,
        problems=names([part.problems for part in parts]),
        episodes=names([part.episodes for part in parts]),
        advantages=np.concatenate([part.advantages for part in parts])[kept],
        num_tokens=np.concatenate([part.num_tokens for part in parts])[kept],
    )


def _total(values_N: Array | None, starts: NDArray[np.int64]) -> Array:
    """Returns the sum over each row's entries, `[R]`; NaN where nothing was said."""
    if values_N is None:
        return np.full(len(starts), np.nan)
    return np.asarray(np.add.reduceat(values_N, starts))


def _largest(values_N: Array | None, starts: NDArray[np.int64]) -> Array:
    """Returns, of each row's entries, that of the largest magnitude, `[R]`; NaN where nothing was said."""
    if values_N is None:
        return np.full(len(starts), np.nan)
    high, low = np.fmax.reduceat(values_N, starts), np.fmin.reduceat(values_N, starts)
    return np.where(high >= -low, high, np.where(np.isnan(high), np.nan, low))
