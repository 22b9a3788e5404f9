"""Finds each policy's trainable parameters and what covers them: taps on modules, or hooks of their own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.routing import adapter_names
from gradscope.probes.taps.choosing import MODES
from gradscope.probes.targets import Claim, Hooked, Layout, Mode, Policy, Target

Owners = dict[str, tuple[nn.Parameter, str | None]]
"""Parameter name -> parameter and policy; None where several policies share it."""


def find_targets(model: nn.Module, routing: Mapping[str, str], mode: Mode) -> Layout:
    """Returns the covered and uncovered trainable parameters of the routed policies.

    Adapters count as trainable whatever `requires_grad` says now, since `set_adapter` flips it. A parameter
    that several modules share is covered by taps when every one of them is known.

    Args:
        model: The model that is probed.
        routing: Slot -> policy, in the order of the slots.
        mode: What may be used.

    Raises:
        ProbeError: Nothing is trainable, or nothing of it can be covered.
    """
    owners = _policy_of_parameter(model, tuple(dict.fromkeys(routing.values())))
    if not owners:
        raise ProbeError(
            f"attach(): {type(model).__name__} has no trainable parameters; set requires_grad or add an "
            "adapter first."
        )
    claims = _claims(model, mode)
    untapped = _untapped(model, owners, claims)
    reasons = {
        name: "trained by several policies at once" for name, (_, policy) in owners.items() if policy is None
    }
    hooked: list[Hooked] = []
    for name, reason in untapped.items():
        parameter, policy = owners[name]
        if policy is None or not MODES[mode].hooks:
            reasons.setdefault(name, reason)
        else:
            hooked.append(Hooked(name, parameter, policy, reason))
    _require_cover(model, owners, reasons)
    policies = {
        policy: _policy(policy, routing, owners, reasons) for policy in dict.fromkeys(routing.values())
    }
    for found in policies.values():
        if not found.covered:
            raise ProbeError(
                f"attach(): policy '{found.name}' has no trainable parameter that can be covered."
            )
    tapped = {
        id(parameter): owner
        for name, (parameter, owner) in owners.items()
        if owner and name not in reasons and name not in untapped
    }
    return Layout(mode, policies, tuple(_targets(claims, tapped)), tuple(hooked), reasons)


def _require_cover(model: nn.Module, owners: Owners, reasons: Mapping[str, str]) -> None:
    if len(reasons) == len(owners):
        name, reason = next(iter(reasons.items()))
        raise ProbeError(
            f"attach(): none of the {len(owners)} trainable parameters of {type(model).__name__} can be "
            f"covered, for instance '{name}': {reason}."
        )


def _policy(name: str, routing: Mapping[str, str], owners: Owners, reasons: Mapping[str, str]) -> Policy:
    slots = tuple(index for index, policy in enumerate(routing.values()) if policy == name)
    covered, uncovered = {}, {}
    for parameter_name, (parameter, owner) in owners.items():
        if parameter_name in reasons and owner in (name, None):
            uncovered[parameter_name] = parameter
        elif owner == name:
            covered[parameter_name] = parameter
    return Policy(name, slots, covered, uncovered)


def _policy_of_parameter(model: nn.Module, policies: tuple[str, ...]) -> Owners:
    adapters = adapter_names(model)
    owners: Owners = {}
    for name, parameter in model.named_parameters():
        adapter = _adapter_in_path(model, name, adapters)
        if adapter is None and parameter.requires_grad:
            owners[name] = (parameter, policies[0] if len(policies) == 1 else None)
        elif adapter in policies:
            owners[name] = (parameter, adapter)
    return owners


def _adapter_in_path(model: nn.Module, name: str, adapters: tuple[str, ...]) -> str | None:
    """Returns the adapter of a parameter: PEFT keeps each as an entry of a dictionary of modules."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in adapters and index > 0:
            container = model.get_submodule(".".join(parts[:index]))
            if isinstance(container, nn.ModuleDict | nn.ParameterDict):
                return part
    return None


Claims = list[tuple[str, nn.Module, Claim]]


def _claims(model: nn.Module, mode: Mode) -> Claims:
    """Returns the claims of a mode, outer modules before those inside them."""
    claims, taken = [], set[int]()
    for name, module in model.named_modules():
        if id(module) not in taken and (claim := MODES[mode].claim(module)) is not None:
            claims.append((name, module, claim))
            taken.update(id(inner) for part in claim.inside for inner in part.modules())
    return claims


def _untapped(model: nn.Module, owners: Owners, claims: Claims) -> dict[str, str]:
    """Returns why parameters cannot be covered by taps; one that can be has no entry."""
    name_of = {id(parameter): name for name, (parameter, _) in owners.items()}
    known = {
        (id(holder), id(parameter))
        for _, module, claim in claims
        for holder in (module, *(inner for part in claim.inside for inner in part.modules()))
        for parameter in claim.parameters.values()
    }
    return {
        name_of[
            id(parameter)
        ]: f"held by '{name}' ({type(module).__name__}), which row segmentation does not know"
        for name, module in model.named_modules()
        for parameter in module._parameters.values()
        if parameter is not None and id(parameter) in name_of and (id(module), id(parameter)) not in known
    }


def _targets(claims: Claims, tapped: Mapping[int, str]) -> list[Target]:
    targets = []
    for name, module, claim in claims:
        parameters = {key: p for key, p in claim.parameters.items() if id(p) in tapped}
        if parameters:
            policies = {key: tapped[id(parameter)] for key, parameter in parameters.items()}
            targets.append(Target(name, module, claim, parameters, policies))
    return targets
