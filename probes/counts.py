"""Per-slot counts of an update from what the loop said about its rows.

Legend: N rows (tokens when packed), K slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradscope.probes.rows import UNTAGGED, RowBatch

Array = NDArray[np.float64]


def slot_counts(batches: Iterable[RowBatch], slots: Sequence[int], num_slots: int) -> dict[str, Array]:
    """Returns the counts of an update, each `[K]`, NaN outside `slots` and where the loop did not say.

    `num_rows`; `num_signal_rows` (advantage not 0) and `advantage_abs_sum` from the advantages that are
    known, not NaN, of a slot that has any; `num_tokens` and `loss_weight` as sums of what was given. In a
    packed batch a row is a stretch of tokens with one slot and one row id, its advantage the largest in
    magnitude among its tokens.
    """
    names = ("num_rows", "num_signal_rows", "num_tokens", "advantage_abs_sum", "loss_weight")
    counts = {name: np.full(num_slots, np.nan) for name in names}
    for values in counts.values():
        values[list(slots)] = 0.0
    known, rows = np.zeros(num_slots), np.zeros(num_slots)
    for batch in batches:
        starts = row_starts(batch)
        row_slots = np.asarray(batch.slot_N)[starts]
        for slot in batch.slots.intersection(slots):
            own = row_slots == slot
            for name, row_values in _row_values(batch, starts).items():
                counts[name][slot] += row_values[own].sum()
            rows[slot] += own.sum()
            known[slot] += _known_advantages(batch, starts)[own].sum()
    for name in ("num_signal_rows", "advantage_abs_sum"):
        counts[name][(rows > 0) & (known == 0)] = np.nan
    return counts


def _known_advantages(batch: RowBatch, starts: NDArray[np.int64]) -> Array:
    """Returns the number of known advantages of each row."""
    if "advantages" not in batch.numbers:
        return np.zeros(len(starts))
    return np.add.reduceat((~np.isnan(batch.numbers["advantages"])).astype(np.float64), starts)


def _row_values(batch: RowBatch, starts: NDArray[np.int64]) -> dict[str, Array]:
    unknown = np.full(len(starts), np.nan)
    tokens, weights = (
        np.add.reduceat(batch.numbers[name], starts) if name in batch.numbers else unknown
        for name in ("tokens", "loss_weights")
    )
    values = {
        "num_rows": np.ones(len(starts)),
        "num_tokens": tokens,
        "loss_weight": weights,
        "num_signal_rows": unknown,
        "advantage_abs_sum": unknown,
    }
    if "advantages" in batch.numbers:
        known = np.abs(batch.numbers["advantages"])
        magnitude = np.maximum.reduceat(np.where(np.isnan(known), 0.0, known), starts)
        values["num_signal_rows"] = (magnitude > 0).astype(np.float64)
        values["advantage_abs_sum"] = magnitude
    return values


def row_starts(batch: RowBatch) -> NDArray[np.int64]:
    """Returns where rows begin: everywhere, or in a packed batch where the slot or the row id changes."""
    if not batch.packed:
        return np.arange(len(batch))
    ids = batch.row_ids if batch.row_ids is not None else [UNTAGGED] * len(batch)
    labels = list(zip(batch.slot_N, ids, strict=True))
    return np.asarray([0, *(at for at in range(1, len(labels)) if labels[at] != labels[at - 1])])
