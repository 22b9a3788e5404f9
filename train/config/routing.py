"""Turns a routing of the configuration into the policy of every slot."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradscope.errors import ConfigError, unknown_name

NAME = re.compile(r"[A-Za-z0-9_-]+")
SHARED = "shared"


def resolve_routing(routing: str | Mapping[str, str], slots: Mapping[str, str]) -> dict[str, str]:
    """Returns slot to policy, in the order of the slots.

    Args:
        routing: `shared`, `isolated`, or a map whose keys are roles or slots; a slot's own entry wins.
        slots: Slot to role, in the workflow's order.

    Raises:
        ConfigError: A role has no entry, or a policy's name cannot name an adapter.
        UnknownNameError: A key is neither a role nor a slot.
    """
    if routing == SHARED:
        return dict.fromkeys(slots, SHARED)
    if isinstance(routing, str):
        return dict(slots)
    allowed = [*dict.fromkeys(slots.values()), *slots]
    for key, policy in routing.items():
        if key not in allowed:
            raise unknown_name("role", key, allowed, where="policy.routing")
        if not NAME.fullmatch(policy):
            raise ConfigError(
                f"policy.routing: '{policy}' (for '{key}') cannot name an adapter. "
                "Use letters, digits, '-' and '_'."
            )
    missing = [slot for slot, role in slots.items() if slot not in routing and role not in routing]
    if missing:
        raise ConfigError(
            f"policy.routing: no policy for {', '.join(missing)}. Add an entry for the role or the slot."
        )
    return {slot: routing.get(slot, routing.get(role, "")) for slot, role in slots.items()}
