"""Inner products of changes of weights that are given by their low-rank factors, without the weights.

The weight that a LoRA layer adds is s B A, so that small changes dA and dB of the factors change it by
s (dB A + B dA), the product of a tall and a wide matrix of twice the rank. Of two such, L R and L' R', the
inner product is the sum of (L'^T L) * (R' R^T), r x r work. Changes of two adapters of one module are changes
of one weight, so they have one, although the adapters share no coordinates.

Legend: O outputs, I inputs, r rank, n changes; leading axes count weights of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """The matrix `left right`, never formed.

    Attributes:
        left: `[..., O, r]`.
        right: `[..., r, I]`.
    """

    left: torch.Tensor
    right: torch.Tensor


def weight_change(
    a: torch.Tensor, b: torch.Tensor, da: torch.Tensor, db: torch.Tensor, *, scaling: torch.Tensor | float
) -> LowRank:
    """Returns the first-order change s (dB A + B dA) of the weight s B A.

    First order, so that the changes of contributors add up.

    Args:
        a: A, `[..., r, I]`.
        b: B, `[..., O, r]`.
        da: Change of A.
        db: Change of B.
        scaling: s.
    """
    return LowRank(torch.cat([db, b], dim=-1) * scaling, torch.cat([a, da], dim=-2))


def products(changes: Sequence[LowRank]) -> torch.Tensor:
    """Returns the inner products of changes of one weight, `[..., n, n]`, float64, on their device."""
    lefts = torch.cat([change.left.double() for change in changes], dim=-1)
    rights = torch.cat([change.right.double() for change in changes], dim=-2)
    weights = (lefts.mT @ lefts) * (rights @ rights.mT)
    ranks = [change.left.shape[-1] for change in changes]
    rows = torch.stack([part.sum(-2) for part in weights.split(ranks, dim=-2)], dim=-2)
    return torch.stack([part.sum(-1) for part in rows.split(ranks, dim=-1)], dim=-1)
