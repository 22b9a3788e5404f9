"""Means over the tokens of each slot, from what a loss computed: entropy, divergences, clipping.

Legend: B rows, T tokens of a completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MEANS = ("entropy", "kl_reference", "kl_old", "clip_fraction")
"""Names of `/train`, in the order of `TokenPass.sums`."""


@dataclass(frozen=True)
class TokenPass:
    """One forward pass of a loss over completions, all `[B, T]` but the advantages.

    Attributes:
        logprobs: Log-probabilities now.
        mask: 1 for scored tokens.
        advantages: `[B]`.
        entropy: Entropies, if known.
        reference: Log-probabilities under the reference policy, if there is one.
        old: Log-probabilities under the policy that sampled; None where that is the present one.
        clip: Lower and upper distance from 1 at which a token's ratio is clipped; None without clipping.
    """

    logprobs: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    old: torch.Tensor | None = None
    clip: tuple[float, float] | None = None

    def sums(self) -> torch.Tensor:
        """Returns the sums over each row's tokens, then their number, `[len(MEANS) + 1, B]`, float64.

        Divergences are estimated by exp(d) - d - 1, which is never negative (k3 of J. Schulman,
        "Approximating KL divergence", 2020). From the reference, d is its log-probability minus the present
        one, as TRL has it; from the policy that sampled the tokens, d is the present one minus its.
        """
        unknown = torch.full_like(self.logprobs, math.nan)
        entropy = unknown if self.entropy is None else self.entropy
        reference = unknown if self.reference is None else _k3(self.reference - self.logprobs)
        log_ratio = torch.zeros_like(self.logprobs) if self.old is None else self.logprobs - self.old
        clipped = unknown if self.clip is None else self._clipped(log_ratio.exp(), *self.clip)
        values = torch.stack([entropy, reference, _k3(log_ratio), clipped]).double()
        kept = torch.where(self.mask.bool(), values, 0.0).sum(-1)
        return torch.cat([kept, self.mask.sum(-1).double()[None]])

    def _clipped(self, ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
        sign = self.advantages.unsqueeze(-1)
        return (((ratio < 1 - low) & (sign < 0)) | ((ratio > 1 + high) & (sign > 0))).to(ratio.dtype)


RowSums = tuple[str, list[float]]
"""A row's slot, and its sums as `TokenPass.sums` gives them."""


def rows_of(slots: Sequence[str | None], sums: Sequence[torch.Tensor]) -> list[RowSums]:
    """Returns the sums of the rows that have a slot.

    Args:
        slots: Slot of each row of all passes.
        sums: What `TokenPass.sums` gave of each pass.
    """
    if not sums:
        return []
    rows = torch.cat(list(sums), dim=1).T.tolist()  # the one wait for the device
    return [(slot, row) for slot, row in zip(slots, rows, strict=True) if slot is not None]


def token_means(rows: Sequence[RowSums]) -> dict[str, dict[str, float]]:
    """Returns metric -> slot -> mean over the slot's tokens; a slot without tokens is absent."""
    totals: dict[str, list[float]] = {}
    for slot, row in rows:
        before = totals.get(slot, [0.0] * len(row))
        totals[slot] = [one + other for one, other in zip(before, row, strict=True)]
    return {
        name: {slot: total[place] / total[-1] for slot, total in totals.items() if total[-1] > 0}
        for place, name in enumerate(MEANS)
    }


def _k3(difference: torch.Tensor) -> torch.Tensor:
    return difference.expm1() - difference
