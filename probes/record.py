"""Turns the sums of one update into its record, after checking that they add up to autograd's gradient.

Legend: K slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators, Summary
from gradscope.probes.counts import slot_counts
from gradscope.probes.rows import RowBatch
from gradscope.probes.targets import Layout, Policy
from gradscope.runfile.update import UpdateRecord


def driven_policies(optimizer: torch.optim.Optimizer, layout: Layout) -> list[Policy]:
    """Returns the policies of which the optimizer holds covered parameters.

    Raises:
        ProbeError: It holds none.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    driven = [
        policy
        for policy in layout.policies.values()
        if any(id(parameter) in held for parameter in policy.covered.values())
    ]
    if not driven:
        raise ProbeError(
            f"step(): the optimizer holds no parameter of the policies {', '.join(layout.policies)}; pass "
            "the one that was made from the probed model's parameters."
        )
    return driven


def make_record(
    sums: SlotAccumulators,
    batches: Sequence[RowBatch],
    slots: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    *,
    reference_norm: float,
) -> tuple[UpdateRecord, Summary]:
    """Returns the record of one policy's update and the summary that it was checked with.

    Args:
        sums: The policy's slot gradients.
        batches: Its micro-batches of this update.
        slots: Names of all slots; those of other policies and those without rows are NaN in the Gram matrix.
        optimizer: The optimizer that is about to step.
        reference_norm: Largest gradient norm of earlier updates; rounding is judged against it when an
            update's own gradient cancels to nothing.

    Raises:
        ProbeError: The slot gradients do not add up to autograd's gradient.
    """
    policy = sums.policy
    summary = sums.summarise()
    _check_sum(sums, summary, reference_norm, tapped=any(batch.tapped for batch in batches))
    counts = slot_counts(batches, policy.slots, len(slots))
    with_rows = [index for index in policy.slots if counts["num_rows"][index] > 0]
    local = [policy.slots.index(index) for index in with_rows]
    gram = np.full((len(slots), len(slots)), np.nan)
    gram[np.ix_(with_rows, with_rows)] = summary.gram[np.ix_(local, local)]
    record = UpdateRecord(
        policy=policy.name,
        slots=slots,
        gram=gram,
        counts=counts,
        coverage=tuple(policy.uncovered),
        scalars={"grad_norm": summary.grad_norm, "learning_rate": _learning_rate(optimizer, policy)},
    )
    return record, summary


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


def _check_sum(sums: SlotAccumulators, summary: Summary, reference_norm: float, *, tapped: bool) -> None:
    name = sums.policy.name
    unseen = sums.unseen()
    if unseen:
        raise ProbeError(
            f"step(): policy '{name}': {len(unseen)} of {len(sums.policy.covered)} covered parameters have a "
            f"gradient that no tap saw, for instance '{unseen[0]}'. Was a forward pass run outside rows(), "
            "or a layer bypassed, compiled or checkpointed in a way that hides it? Gradients must be zeroed "
            "between updates."
        )
    if tapped and sums.empty and all(parameter.grad is None for parameter in sums.policy.covered.values()):
        raise ProbeError(
            f"step(): policy '{name}': rows were run, but no gradient reached its parameters. Call "
            "step() after backward() and before zero_grad()."
        )
    if not math.isfinite(summary.covered_norm):
        return  # a diverged update is recorded as it is
    tolerance = math.sqrt(sums.eps)
    if not summary.gap <= tolerance * max(summary.finite_norm, reference_norm):
        worst = ", ".join(f"'{parameter}' ({gap:.2g})" for parameter, gap in sums.largest_gaps(3))
        raise ProbeError(
            f"step(): policy '{name}': the slot gradients miss autograd's gradient by {summary.residual:.2g} "
            f"of its norm (allowed about {tolerance:.1g}), most at {worst}. A forward pass outside rows(), "
            "gradients not zeroed between updates, clipped, unscaled or averaged before step(), or a use of "
            "the weights that no module call shows."
        )


def _learning_rate(optimizer: torch.optim.Optimizer, policy: Policy) -> float:
    held = {id(parameter) for parameter in policy.covered.values()}
    for group in optimizer.param_groups:
        if any(id(parameter) in held for parameter in group["params"]):
            return float(group["lr"])
    return math.nan
