"""Functional influence: how far one contributor's change alone moves what a slot says; forward passes only.

F_jk = KL(pi_j(theta) || pi_j(theta - u_k)), theta being the parameters before the step and u_k contributor
k's applied change, in nats a position, the mean over the positions that the caller's logits are of. It sees
what products of gradients miss: effects of second order, and what a change does far from the rows that made
it.

Legend: K slots, M contributors, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.evidence.applied import Applied
from gradscope.probes.verify import same_randomness

Array = NDArray[np.float64]

NUMBERS = 1 << 22
"""Logits turned into float64 at a time (32 MiB)."""

LogitsOfSlot = Callable[[str], torch.Tensor | None]
"""Next-token logits (or log-probabilities) of a slot at its positions, `[..., V]`, by the model as it is now;
None where the slot has none."""


def influence(
    model: nn.Module, applied: Applied, slots: Iterable[str], logits_of: LogitsOfSlot
) -> dict[str, Array]:
    """Returns F for each slot, `[M]`; the model's parameters and random numbers are as before.

    Args:
        model: The model.
        applied: What a step changed.
        slots: Slots of the policy that was updated.
        logits_of: The forward pass.

    Raises:
        ProbeError: The logits are no `[..., V]`, or change their shape.
    """
    found = {}
    with torch.no_grad(), applied.placed() as place:
        for slot in slots:
            place.before()
            with same_randomness(model):
                before = logits_of(slot)
            if before is None:
                continue
            values = []
            for contributor in range(len(applied.contributors)):
                place.after(contributor)
                with same_randomness(model):
                    after = logits_of(slot)
                values.append(divergence(_checked(slot, before), _checked(slot, after, like=before)))
            found[slot] = torch.stack(values).cpu().numpy()
    return found


def divergence(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns KL(p || q), the mean over positions, of the distributions that logits `[..., V]` stand for.

    Summed as p (log p/q - 1 + q/p), which is never negative and loses nothing where q is close to p.
    """
    num_tokens = before.shape[-1]
    length = max(1, NUMBERS // num_tokens)
    total, num_positions = before.new_zeros((), dtype=torch.float64), before.numel() // num_tokens
    pairs = (logits.reshape(-1, num_tokens).split(length) for logits in (before, after))
    for one, other in zip(*pairs, strict=True):
        log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (one, other))
        p, ratio = log_p.exp(), log_p - log_q
        total += torch.where(p > 0, p * (torch.expm1(-ratio) + ratio), log_q.exp()).sum()
    return total / num_positions


def _checked(slot: str, logits: object, *, like: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(logits, torch.Tensor) or not logits.dim() or not logits.is_floating_point():
        raise ProbeError(
            f"influence(): slot '{slot}' gave {logits!r:.60}; expected logits of the next token, [..., V]."
        )
    if like is not None and logits.shape != like.shape:
        raise ProbeError(
            f"influence(): slot '{slot}' gave logits of shape {list(like.shape)}, then {list(logits.shape)}; "
            "give the same positions each time."
        )
    return logits
