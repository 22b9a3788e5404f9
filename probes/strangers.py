"""Parameters of the model that came or went since `attach`: unfrozen, added, or taken out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.targets import Layout, Policy


def driven_by(optimizer: torch.optim.Optimizer, layout: Layout) -> list[Policy]:
    """Returns the policies of which an optimizer holds covered parameters."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        policy
        for policy in layout.policies.values()
        if any(id(parameter) in held for parameter in policy.covered.values())
    ]


def find_strangers(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> list[str]:
    """Returns parameters of the model that an optimizer is about to move and nobody knew at `attach`.

    They count as not covered from then on, in every policy that the optimizer drives, so that records name
    them and their gradients are in `grad_norm`.
    """
    known = {
        id(parameter)
        for policy in layout.policies.values()
        for parameter in (*policy.covered.values(), *policy.uncovered.values())
    }
    moved = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and id(parameter) not in known
    }
    if not moved:
        return []
    found = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in moved}
    for policy in driven_by(optimizer, layout):
        policy.uncovered.update(found)
    return list(found)


def told_of_strangers(names: Sequence[str]) -> str:
    """Returns the warning about such parameters."""
    return (
        f"step(): {len(names)} parameters that the optimizer moves are trained only since attach(), for "
        f"instance '{names[0]}'; products and changes leave them out, and record.coverage names them. "
        "detach() and attach() again to measure them."
    )


def check_still_there(model: nn.Module, policy: Policy) -> None:
    """Checks that a policy of which no gradient came is still a part of the model.

    Raises:
        ProbeError: Its parameters were taken out, as by merging adapters.
    """
    there = {id(parameter) for parameter in model.parameters()}
    gone = [name for name, parameter in policy.covered.items() if id(parameter) not in there]
    if gone:
        raise ProbeError(
            f"step(): {len(gone)} of {len(policy.covered)} covered parameters of policy '{policy.name}' are "
            f"no longer in the model, for instance '{gone[0]}', and no gradient came; adapters merged and "
            "unloaded? attach() again to the model that is trained."
        )
