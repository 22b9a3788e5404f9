"""Gradients that are known as a whole only: exact where all their rows are of one slot, else left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch


def slots_of(batches: Sequence[RowBatch]) -> frozenset[int]:
    """Returns the slots of micro-batches."""
    return frozenset().union(*(batch.slots for batch in batches))


def add_whole(
    into: SlotAccumulators, parameter: nn.Parameter, batches: Sequence[RowBatch], gradient: torch.Tensor
) -> None:
    """Gives a gradient to the slot of its rows; where they are of several, leaves the parameter out.

    Args:
        into: The sums of the parameter's policy.
        parameter: Whose gradient it is.
        batches: The micro-batches that the gradient comes from.
        gradient: The gradient, of the parameter's shape.

    Raises:
        ProbeError: The rows belong to a slot of another policy.
    """
    slots = slots_of(batches)
    check_policy(batches, into)
    if len(slots) > 1:
        into.leave_out(parameter)
    elif slots and id(parameter) not in into.left_out:
        local = into.cells.local
        places = {local[cell] for batch in batches for cell in batch.cell_N if cell in local}
        if len(places) > 1:  # of one slot, but of several halves or labels
            into.undivided |= slots
        into.separate(parameter)[min(places)].add_(gradient)
        into.terms.note([(gradient.reshape(1, -1), None)])


def check_policy(batches: Sequence[RowBatch], into: SlotAccumulators) -> None:
    """Refuses rows of slots of another policy.

    Raises:
        ProbeError: There are some.
    """
    strangers = slots_of(batches).difference(into.policy.slots)
    if strangers:
        raise ProbeError(
            f"rows of {', '.join(batches[0].names[slot] for slot in sorted(strangers))} went through the "
            f"parameters of policy '{into.policy.name}', to which they are not routed; activate the policy "
            "of the rows before the forward pass (set_adapter), one forward pass a policy."
        )
