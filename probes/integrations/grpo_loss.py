"""The weight that each completion has in TRL's losses (trl 1.16, `GRPOTrainer._compute_loss`).

A weight is the sum of the factors with which the completion's token losses enter the loss of the update: it
adds up to 1 over the update for means over tokens or rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MEANS_OF_ROWS = ("grpo", "sapo")
MEANS_OF_TOKENS = ("dapo", "cispo", "vespo")


def loss_weights(
    tokens: Sequence[int], *, loss_type: str, num_passes: int, longest: int, num_items: float
) -> list[float]:
    """Returns the weight of each row of a micro-batch, `[B]`; NaN for a loss that is not known here.

    Args:
        tokens: Scored tokens of each row, `[B]`.
        loss_type: TRL's name of the loss.
        num_passes: Micro-batches of the update, of all processes: their gradients are averaged.
        longest: Largest number of tokens of a completion.
        num_items: Scored tokens of the update in all processes, as TRL counts them.
    """
    num_rows = len(tokens)
    if loss_type in MEANS_OF_ROWS:
        return [float(count > 0) / num_rows / num_passes for count in tokens]
    if loss_type in MEANS_OF_TOKENS:
        return [count / max(num_items, 1.0) for count in tokens]
    divisors = {
        "bnpo": max(sum(tokens), 1) * num_passes,
        "dr_grpo": num_rows * longest * num_passes,
        "luspo": num_rows * num_passes,
    }
    return [count / divisors[loss_type] if loss_type in divisors else math.nan for count in tokens]
