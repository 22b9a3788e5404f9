"""Finds each policy's trainable parameters and the modules through which row segmentation covers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gradscope.errors import ProbeError
from gradscope.probes.routing import adapter_names

Kind = Literal["linear", "embedding", "rowwise"]

_ROWWISE_SUFFIXES = ("RMSNorm", "LayerNorm", "Conv1D")
"""Ends of class names of norms, torch's and transformers', and of GPT-2's transposed linear layer."""


@dataclass(frozen=True)
class Policy:
    """The parameters of one policy.

    Attributes:
        name: Adapter name, or `default` for a model without adapters.
        slots: Indices of the slots routed to it.
        covered: Parameter name -> parameter, for all that row segmentation covers.
        uncovered: Parameter name -> parameter, for the trainable rest.
    """

    name: str
    slots: tuple[int, ...]
    covered: dict[str, nn.Parameter]
    uncovered: dict[str, nn.Parameter]


@dataclass(frozen=True)
class Target:
    """One module to tap; `parameters` are those of its own that are covered, by their name in the module."""

    name: str
    module: nn.Module
    kind: Kind
    policy: str
    parameters: dict[str, nn.Parameter]


@dataclass(frozen=True)
class Layout:
    """What a probe will measure; `reasons` says for each uncovered parameter why."""

    policies: dict[str, Policy]
    targets: tuple[Target, ...]
    reasons: dict[str, str]


def find_targets(model: nn.Module, routing: Mapping[str, str]) -> Layout:
    """Returns the covered and uncovered trainable parameters of the routed policies.

    Adapters count as trainable whatever `requires_grad` says now, since `set_adapter` flips it. A parameter
    that several modules share is covered when row segmentation knows every one of them.

    Args:
        model: The model that is probed.
        routing: Slot -> policy, in the order of the slots.

    Raises:
        ProbeError: Nothing is trainable, nothing of it can be covered, or a module mixes rows of the batch.
    """
    _refuse_batch_statistics(model)
    owners = _policy_of_parameter(model, tuple(dict.fromkeys(routing.values())))
    if not owners:
        raise ProbeError(
            f"attach(): {type(model).__name__} has no trainable parameters; set requires_grad or add an "
            "adapter first."
        )
    reasons = _reasons(model, owners)
    if len(reasons) == len(owners):
        name, reason = next(iter(reasons.items()))
        raise ProbeError(
            f"attach(): none of the {len(owners)} trainable parameters of {type(model).__name__} can be "
            f"covered, for instance '{name}': {reason}."
        )
    covered = {id(p): owner for name, (p, owner) in owners.items() if owner and name not in reasons}
    policies = {
        policy: _policy(policy, routing, owners, reasons) for policy in dict.fromkeys(routing.values())
    }
    for policy in policies.values():
        if not policy.covered:
            raise ProbeError(
                f"attach(): policy '{policy.name}' has no trainable parameter that can be covered."
            )
    return Layout(policies, tuple(_targets(model, covered)), reasons)


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Refuses a norm over the rows of the batch: it makes a slot's loss depend on other slots' rows."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ProbeError(
                f"attach(): '{name}' ({type(module).__name__}) normalises over the rows of all slots, so "
                "no slot has a gradient of its own. Put it into eval mode before attach(), or use a norm of "
                "single rows."
            )


Owners = dict[str, tuple[nn.Parameter, str | None]]
"""Parameter name -> parameter and policy; None where several policies share it."""


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


def _reasons(model: nn.Module, owners: Owners) -> dict[str, str]:
    """Returns why parameters cannot be covered; a covered parameter has no entry."""
    name_of = {id(parameter): name for name, (parameter, _) in owners.items()}
    reasons = {
        name: "trained by several policies at once" for name, (_, policy) in owners.items() if policy is None
    }
    for module_name, module in model.named_modules():
        if module_kind(module) is not None:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in name_of:
                reasons.setdefault(
                    name_of[id(parameter)],
                    f"held by '{module_name}' ({type(module).__name__}), which row segmentation does not "
                    "know",
                )
    return reasons


def _targets(model: nn.Module, covered: Mapping[int, str]) -> list[Target]:
    targets = []
    for name, module in model.named_modules():
        kind = module_kind(module)
        parameters = {
            key: parameter
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in covered
        }
        if kind is not None and parameters:
            policy = covered[id(next(iter(parameters.values())))]
            targets.append(Target(name, module, kind, policy, parameters))
    return targets


def module_kind(module: nn.Module) -> Kind | None:
    """Returns how the slot gradients of a module's own parameters are computed; None when they cannot be."""
    cls = type(module)
    if cls.forward is nn.Linear.forward and not isinstance(module, NonDynamicallyQuantizableLinear):
        return "linear"
    if isinstance(module, nn.Embedding) and cls.forward is nn.Embedding.forward:
        plain = not module.sparse and not module.scale_grad_by_freq and module.max_norm is None
        return "embedding" if plain else None
    is_leaf = next(module.children(), None) is None
    if is_leaf and cls.__name__.endswith(_ROWWISE_SUFFIXES):
        return "rowwise"
    return None
