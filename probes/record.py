"""Turns the sums of one update into its record, after checking that they add up to autograd's gradient.

Legend: K slots of the policy, S of all policies, L labels, C cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.agreement import Agreed
from gradscope.probes.cells import Cells
from gradscope.probes.counts import slot_counts
from gradscope.probes.rows import RowBatch
from gradscope.probes.summary import Summary
from gradscope.probes.targets import Policy
from gradscope.runfile.update import UpdateRecord


def make_record(
    sums: SlotAccumulators,
    batches: Sequence[RowBatch],
    slots: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    *,
    labels: tuple[str, ...],
    agreed: Agreed,
) -> tuple[UpdateRecord, Summary]:
    """Returns the record of one policy's update and the summary that it was checked with.

    Args:
        sums: The policy's slot gradients.
        batches: Its micro-batches of this update.
        slots: Names of all slots; those of other policies and those without rows are NaN in the Gram matrix.
        optimizer: The optimizer that is about to step.
        labels: The declared labels.
        agreed: What all processes have of the policy.

    Raises:
        ProbeError: The slot gradients do not add up to autograd's gradient.
    """
    policy = sums.policy
    summary = sums.summarise()
    _check_sum(sums, summary, agreed)
    rows = _count_rows(sums, batches, len(slots))
    record = UpdateRecord(
        policy=policy.name,
        slots=slots,
        gram=_among_all(summary.gram, rows.there, sums.cells),
        counts=rows.counts,
        coverage=sums.coverage(),
        scalars={"grad_norm": summary.grad_norm, "learning_rate": _learning_rate(optimizer, policy)},
        gram_cross=_gram_cross(summary, rows, agreed),
        labels=labels,
        label_gram=_label_gram(summary, rows) if labels else None,
    )
    return record, summary


@dataclass(frozen=True)
class _Rows:
    """The rows of an update over all processes.

    Attributes:
        counts: By name, each `[S]`.
        of_cell: Number of rows (tokens when packed) of each cell, `[C]`.
        halved: Whether problems were given for any.
        without_problem: Which of the policy's slots have a row without known problem, `[K]`.
        undivided: Which have gradients that are known as a whole only, not by half and label, `[K]`.
        there: Which have rows, `[K]`.
    """

    counts: dict[str, NDArray[np.float64]]
    of_cell: NDArray[np.int64]
    halved: bool
    without_problem: NDArray[np.bool_]
    undivided: NDArray[np.bool_]
    there: NDArray[np.bool_]


def _count_rows(sums: SlotAccumulators, batches: Sequence[RowBatch], num_slots: int) -> _Rows:
    cells = sums.cells
    counts = slot_counts(batches, cells.slots, num_slots)
    unknown = [sum(slot in batch.without_problem for batch in batches) for slot in cells.slots]
    parts: list[NDArray[np.float64]] = [
        *counts.values(),
        sum((batch.num_rows(cells).astype(np.float64) for batch in batches), np.zeros(len(cells))),
        np.asarray(unknown, dtype=np.float64),
        np.asarray([slot in sums.undivided for slot in cells.slots], dtype=np.float64),
        np.asarray([sum(batch.halved for batch in batches)], dtype=np.float64),
    ]
    sizes = np.cumsum([len(part) for part in parts])[:-1]
    numbers = np.sum(sums.reduction.gather(np.concatenate(parts)), axis=0)
    *totals, of_cell, without_problem, undivided, halved = np.split(numbers, sizes)
    return _Rows(
        counts=dict(zip(counts, totals, strict=True)),
        of_cell=of_cell.astype(np.int64),
        halved=bool(halved[0]),
        without_problem=without_problem > 0,
        undivided=undivided > 0,
        there=totals[list(counts).index("num_rows")][list(cells.slots)] > 0,
    )


def _gram_cross(summary: Summary, rows: _Rows, agreed: Agreed) -> NDArray[np.float64] | None:
    """Returns the products between halves, `[S, S]`; None when no problems were given."""
    if not rows.halved:
        return None
    cross = summary.cells.cross_gram(summary.cell_gram, rows.of_cell)
    known = rows.there & ~rows.without_problem & ~rows.undivided
    return _among_all(cross, known & (not agreed.conflict), summary.cells)


def _label_gram(summary: Summary, rows: _Rows) -> NDArray[np.float64]:
    """Returns the products of slots x labels, `[S, L, S, L]`; NaN where such rows are absent."""
    cells = summary.cells
    there_KL = rows.of_cell.reshape(cells.num_halves, len(cells.slots), cells.num_labels).sum(0) > 0
    there_KL &= ~rows.undivided[:, None]
    products = cells.label_gram(summary.cell_gram)
    products[~there_KL] = np.nan
    products[:, :, ~there_KL] = np.nan
    result = np.full((cells.num_slots, cells.num_labels) * 2, np.nan)
    result[np.ix_(cells.slots, range(cells.num_labels), cells.slots, range(cells.num_labels))] = products
    return result


def _among_all(products: NDArray[np.float64], there: NDArray[np.bool_], cells: Cells) -> NDArray[np.float64]:
    """Returns products of a policy's slots, `[K, K]`, among all, `[S, S]`; NaN for those not `there`."""
    result = np.full((cells.num_slots, cells.num_slots), np.nan)
    own = np.flatnonzero(there)
    places = np.asarray(cells.slots)[own]
    result[np.ix_(places, places)] = products[np.ix_(own, own)]
    return result


def check_policy_without_rows(sums: SlotAccumulators) -> None:
    """Checks that a policy for which no rows were announced has no gradient either.

    Raises:
        ProbeError: It has one.
    """
    unseen = sums.unseen()
    if unseen or not sums.empty:
        raise ProbeError(
            f"step(): policy '{sums.policy.name}' has gradients but no rows were announced for it; run every "
            "forward pass that is trained on inside `with scope.rows(...)`, and zero the gradients between "
            "updates."
        )


def _check_sum(sums: SlotAccumulators, summary: Summary, agreed: Agreed) -> None:
    name = sums.policy.name
    unseen = sums.unseen()
    if unseen:
        raise ProbeError(
            f"step(): policy '{name}': {len(unseen)} of {len(sums.policy.covered)} covered parameters have a "
            f"gradient that no tap saw, for instance '{unseen[0]}'. Was a forward pass run outside rows(), "
            "or a layer bypassed, compiled or checkpointed in a way that hides it? Gradients must be zeroed "
            "between updates."
        )
    if agreed.tapped and sums.empty and not agreed.has_gradient:
        raise ProbeError(
            f"step(): policy '{name}': rows were run, but no gradient reached its parameters. Call "
            "step() after backward() and before zero_grad()."
        )
    if not math.isfinite(summary.covered_norm):
        return  # a diverged update is recorded as it is
    tolerance = math.sqrt(sums.eps)
    if not summary.gap <= tolerance * summary.added_norm(sums.eps):
        worst = ", ".join(f"'{parameter}' ({gap:.2g})" for parameter, gap in sums.largest_gaps(3))
        raise ProbeError(
            f"step(): policy '{name}': the slot gradients miss autograd's gradient by {summary.residual:.2g} "
            f"of its norm (allowed about {tolerance:.1g}), most at {worst}. A forward pass outside rows(), "
            "gradients not zeroed between updates, clipped, unscaled or averaged before step(), a backward "
            "pass beside backward() that leaves .grad alone (torch.autograd.grad), or a use of the weights "
            "that no module call shows."
        )


def _learning_rate(optimizer: torch.optim.Optimizer, policy: Policy) -> float:
    held = {id(parameter) for parameter in policy.covered.values()}
    for group in optimizer.param_groups:
        if any(id(parameter) in held for parameter in group["params"]):
            return float(group["lr"])
    return math.nan
