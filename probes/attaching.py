"""`attach`: chooses what to measure on a model and puts a scope on it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from gradscope.errors import ProbeError, nearest
from gradscope.probes.attribution import Attribution
from gradscope.probes.covering import find_targets
from gradscope.probes.evidence.settings import Evidence
from gradscope.probes.refusals import refuse_models
from gradscope.probes.routing import route_slots
from gradscope.probes.scope import Scope
from gradscope.probes.taps.choosing import MODES
from gradscope.probes.targets import Layout, Mode


def attach(
    model: nn.Module,
    slots: Mapping[str, str],
    policies: Mapping[str, str] | None = None,
    *,
    mode: Mode = "auto",
    labels: Sequence[str] = (),
    attribution: Attribution | None = None,
    evidence: Evidence | None = None,
) -> Scope:
    """Returns a scope that measures each slot's gradient in the model's own backward passes.

    Call it once, after adapters are added and before `torch.compile` or a data-parallel wrapper. Weights,
    gradients and random numbers of the training stay bitwise what they are without it; in mode `fused`
    weights and gradients stay so within rounding.

    Args:
        model: The model that the loop trains: any module; with PEFT adapters each adapter is a policy.
        slots: Slot -> role, in the order of every result.
        policies: Role or slot -> policy (adapter name); None sends all to the active adapter.
        mode: `observe` taps modules and leaves autograd's own weight gradients alone; `fused` runs linear and
            LoRA layers as one autograd node each, whose weight gradient is the sum of the slots', and taps
            the rest: fastest on an accelerator and for full fine-tuning; `pure` hooks parameters of any kind
            and takes micro-batches of one slot each; `auto` is `observe` with hooks for what taps do not
            cover, exact in updates whose micro-batches hold one slot each.
        labels: Second labels that rows may carry beside their slot (right or wrong, sign of the advantage,
            turn); slots x labels are at most 32.
        attribution: How applied changes are attributed; by role and exact when not given.
        evidence: How often modules and single rows are looked at.

    Raises:
        ProbeError: The model is probed already, has nothing trainable or nothing that can be covered, or a
            slot cannot be routed.

    Warns:
        UserWarning: Some trainable parameters are not covered; `Scope.coverage` says which and why.
    """
    if mode not in MODES:
        raise ProbeError(
            f"attach(): unknown mode '{mode}'.{nearest(mode, MODES)} Allowed: {', '.join(MODES)}."
        )
    refuse_models(model)
    routing = route_slots(model, slots, policies)
    layout = find_targets(model, routing, mode)
    _warn_of_gaps(layout)
    return Scope(model, slots, layout, labels=labels, attribution=attribution, evidence=evidence)


def _warn_of_gaps(layout: Layout) -> None:
    if layout.reasons:
        name, reason = next(iter(layout.reasons.items()))
        warnings.warn(
            f"{len(layout.reasons)} trainable parameters are not covered, for instance '{name}': {reason}. "
            "The Gram matrix leaves them out.",
            stacklevel=3,
        )
    if layout.hooked and layout.mode != "pure":
        first = layout.hooked[0]
        warnings.warn(
            f"{len(layout.hooked)} trainable parameters are covered only in updates whose micro-batches hold "
            f"one slot each, for instance '{first.name}': {first.reason}. record.coverage names those left "
            "out.",
            stacklevel=3,
        )
