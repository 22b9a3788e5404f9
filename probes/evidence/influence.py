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
                before = _log_probs(slot, logits_of(slot))
            if before is None:
                continue
            values = []
            for contributor in range(len(applied.contributors)):
                place.after(contributor)
                with same_randomness(model):
                    after = _log_probs(slot, logits_of(slot))
                values.append(_divergence(slot, before, after))
            found[slot] = torch.stack(values).cpu().numpy()
    return found


def _log_probs(slot: str, logits: torch.Tensor | None) -> torch.Tensor | None:
    if logits is None:
        return None
    if not isinstance(logits, torch.Tensor) or logits.dim() < 1 or not logits.is_floating_point():
        what = f"shape {list(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ProbeError(
            f"influence(): slot '{slot}' gave {what}; expected logits of the next token, [..., V], or None."
        )
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def _divergence(slot: str, before: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """Returns KL(before || after), the mean over positions, float64."""
    if after is None or after.shape != before.shape:
        shape = None if after is None else list(after.shape)
        raise ProbeError(
            f"influence(): slot '{slot}' gave logits of shape {list(before.shape)}, then {shape}; give the "
            "same positions each time."
        )
    terms = before.exp() * (before - after)
    # Where the probability is 0 both logarithms may be -inf.
    return torch.nan_to_num(terms, nan=0.0).sum(-1, dtype=torch.float64).mean()
