"""Which policy each slot trains: read from the caller's map, or from the model's active PEFT adapter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gradscope.errors import ProbeError, nearest

WHOLE_MODEL = "default"
"""Name of the only policy of a model without adapters."""


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the model's PEFT adapters in the order they were added; none without PEFT."""
    holder = _peft_holder(model)
    return tuple(holder.peft_config) if holder is not None else ()  # type: ignore[arg-type]


def route_slots(
    model: nn.Module, slots: Mapping[str, str], policies: Mapping[str, str] | None
) -> dict[str, str]:
    """Returns slot -> policy.

    Args:
        model: The model that is probed.
        slots: Slot -> role.
        policies: Role or slot -> policy, a slot's own entry first; None sends all slots to the active
            adapter.

    Raises:
        ProbeError: No slots or no mapping, an unknown role or slot as key, a slot without entry, an unknown
            policy, or no single active adapter to infer the policy from.
    """
    if not isinstance(slots, Mapping):
        given = type(slots).__name__
        raise ProbeError(
            f"attach(): slots is a {given}; give a mapping slot -> role, as in "
            "{'generator/0': 'generator'}."
        )
    if not slots:
        raise ProbeError("attach(): slots is empty; give slot -> role, as in {'generator/0': 'generator'}.")
    adapters = adapter_names(model)
    if policies is None:
        return dict.fromkeys(slots, _only_policy(model, adapters))
    _check_keys(slots, policies)
    routing = {}
    for slot, role in slots.items():
        policy = policies.get(slot, policies.get(role))
        if policy is None:
            raise ProbeError(
                f"attach(): slot '{slot}' has no policy; add it or its role '{role}' to policies."
            )
        if adapters and policy not in adapters:
            raise ProbeError(
                f"attach(): slot '{slot}' is routed to the unknown policy '{policy}'."
                f"{nearest(policy, adapters)} Adapters of the model: {', '.join(adapters)}."
            )
        routing[slot] = policy
    found = dict.fromkeys(routing.values())
    if not adapters and len(found) > 1:
        raise ProbeError(
            f"attach(): policies names {len(found)} policies ({', '.join(found)}), but the model has no "
            "adapters to tell them apart. Use one policy, or attach one probe to each model."
        )
    return routing


def _check_keys(slots: Mapping[str, str], policies: Mapping[str, str]) -> None:
    known = [*slots, *dict.fromkeys(slots.values())]
    for key in policies:
        if key not in known:
            raise ProbeError(
                f"attach(): policies has the key '{key}', neither a role nor a slot.{nearest(key, known)} "
                f"Allowed: {', '.join(known)}."
            )


def _only_policy(model: nn.Module, adapters: tuple[str, ...]) -> str:
    if not adapters:
        return WHOLE_MODEL
    holder = _peft_holder(model)
    # PeftModel has a property, transformers' own integration a method of another name.
    active = holder.active_adapters if holder is not None else ()
    names = active() if callable(active) else active
    if not isinstance(names, list | tuple) or len(names) != 1:
        raise ProbeError(
            f"attach(): the active adapters are {names}; say with policies which adapter each role trains. "
            f"Adapters of the model: {', '.join(adapters)}."
        )
    return str(names[0])


def _peft_holder(model: nn.Module) -> nn.Module | None:
    for module in model.modules():
        if isinstance(getattr(module, "peft_config", None), dict):
            return module
    return None
