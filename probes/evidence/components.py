"""Gradients of the parts of a loss (policy, KL, entropy), which rows alone cannot tell apart.

Legend: n components, C cells, K slots of a policy, S slots of all policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.runfile.evidence import ComponentGram


def component_gram(
    sums: Mapping[str, SlotAccumulators], slots: Sequence[str], there: Sequence[int]
) -> ComponentGram:
    """Returns the products of components x slots of one policy.

    Args:
        sums: Component -> its sums, all of one policy and with the same cells.
        slots: Names of all slots.
        there: Those of the policy that have rows.
    """
    first = next(iter(sums.values()))
    num, num_cells, cells = len(sums), len(first.cells), first.cells
    products = np.zeros((num * num_cells, num * num_cells))
    for blocks in zip(*(own.local_blocks() for own in sums.values()), strict=True):
        total = torch.zeros(len(products), len(products), dtype=torch.float64, device=blocks[0].sums.device)
        for segment in first.segments(blocks[0], num_rows=len(products)):
            part = torch.cat([block.sums[:, segment.start : segment.stop] for block in blocks]).double()
            total += part @ part.T
        products += first.reduction.add_up(total).cpu().numpy()
    split = products.reshape(num, num_cells, num, num_cells)
    gram = np.full((num, len(slots), num, len(slots)), np.nan)
    local = [cells.slots.index(slot) for slot in there]
    for i in range(num):
        for j in range(num):
            own = cells.gram(split[i, :, j])
            gram[i, :, j][np.ix_(there, there)] = own[np.ix_(local, local)]
    return ComponentGram(tuple(sums), tuple(slots), gram)


def check_losses(losses: Mapping[str, torch.Tensor], known: Sequence[str]) -> None:
    """Checks what `Scope.components` was given.

    Raises:
        ProbeError: No losses, other names than before in this update, or one that is no number.
    """
    if not losses or (known and tuple(losses) != tuple(known)):
        raise ProbeError(
            f"components(): got {', '.join(losses) or 'no losses'}; give the same parts of the loss for "
            f"every micro-batch of an update{': ' + ', '.join(known) if known else ''}."
        )
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ProbeError(
                f"components(): '{name}' is no single number; give each part as it is summed up."
            )


def hides_parameters(node: torch.autograd.graph.Node) -> bool:
    """Returns whether a graph holds reentrant checkpoints, behind which no gradient can be asked for."""
    waiting, known = [node], {node}
    while waiting:
        one = waiting.pop()
        if one.name() == "CheckpointFunctionBackward":
            return True
        following = {edge for edge, _ in one.next_functions if edge is not None} - known
        known |= following
        waiting += following
    return False
