"""`attach`: chooses what to measure on a model and puts a scope on it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from gradscope.errors import ProbeError, nearest
from gradscope.probes.routing import route_slots
from gradscope.probes.scope import Scope
from gradscope.probes.taps.capture import Tap
from gradscope.probes.targets import find_targets

Mode = Literal["auto", "observe"]


def attach(
    model: nn.Module,
    slots: Mapping[str, str],
    policies: Mapping[str, str] | None = None,
    *,
    mode: Mode = "auto",
    labels: Sequence[str] = (),
) -> Scope:
    """Returns a scope that measures each slot's gradient in the model's own backward passes.

    Call it once, after adapters are added and before `torch.compile` or a data-parallel wrapper. Weights,
    gradients and random numbers of the training stay bitwise what they are without it.

    Args:
        model: The model that the loop trains: any module; with PEFT adapters each adapter is a policy.
        slots: Slot -> role, in the order of every result.
        policies: Role or slot -> policy (adapter name); None sends all to the active adapter.
        mode: `observe` leaves autograd's own weight gradients alone; `auto` chooses it.
        labels: Second labels that rows may carry beside their slot (right or wrong, sign of the advantage,
            turn); slots x labels are at most 32.

    Raises:
        ProbeError: The model is probed already, has nothing trainable or nothing that can be covered, or a
            slot cannot be routed.

    Warns:
        UserWarning: Some trainable parameters are not covered; `Scope.coverage` says which and why.
    """
    if mode not in ("auto", "observe"):
        raise ProbeError(
            f"attach(): unknown mode '{mode}'.{nearest(mode, ['observe'])} Allowed: auto, observe."
        )
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise ProbeError(
                "attach(): the model is compiled; attach to the model that was given to torch.compile."
            )
        if any(isinstance(hook, Tap) for hook in module._forward_hooks.values()):
            raise ProbeError(
                f"attach(): the model is probed already (at '{name}'); call detach() of the first scope."
            )
    layout = find_targets(model, route_slots(model, slots, policies))
    if layout.reasons:
        names = list(layout.reasons)
        warnings.warn(
            f"{len(names)} trainable parameters are not covered, for instance '{names[0]}': "
            f"{layout.reasons[names[0]]}. The Gram matrix leaves them out.",
            stacklevel=2,
        )
    return Scope(model, slots, layout, labels=labels)
