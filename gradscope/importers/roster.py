"""Who takes part in an imported run: its slots, their roles, and the policies that they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradscope.importers.dialect import Dialect, Meaning
from gradscope.importers.log import ForeignLog

ALONE = "policy"
"""Name of the one role, slot and policy of a log that names no roles, and of a policy that nobody named."""


@dataclass(frozen=True)
class Roster:
    """Slots, roles and policies of an imported run.

    A log that knows roles but not their instances has one slot a role, called as the role.

    Attributes:
        slots: Slot to role.
        policies: Slot to policy.
        assumed: Slots whose policy the log does not tell.
    """

    slots: Mapping[str, str]
    policies: Mapping[str, str]
    assumed: tuple[str, ...]

    def slot_of(self, meaning: Meaning) -> str | None:
        """Returns the slot that a key is about: the one it names, or the only one; None where it is open."""
        name = meaning.labels.get("slot") or meaning.role
        if name:
            return name if name in self.slots else None
        return next(iter(self.slots)) if len(self.slots) == 1 else None

    def policy_of(self, meaning: Meaning) -> str | None:
        """Returns the policy that a key of an update is about; None where it is open."""
        named = meaning.labels.get("policy")
        if named:
            return named
        slot = self.slot_of(meaning)
        if slot is not None:
            return self.policies[slot]
        names = set(self.policies.values())
        return names.pop() if len(names) == 1 and not meaning.role else None

    def slots_on(self, policy: str) -> tuple[str, ...]:
        """Returns the slots that train a policy."""
        return tuple(slot for slot, own in self.policies.items() if own == policy)


def roster(meanings: Iterable[Meaning], dialect: Dialect, log: ForeignLog) -> Roster:
    """Returns who takes part, from what the source says, the dialect knows and the keys name.

    A role with a gradient norm of its own has a policy of its own. Roles without one are put on one policy.
    """
    slots: dict[str, str] = {**log.said("slots"), **{role: role for role in dialect.roles}}
    known: dict[str, str] = log.said("policies")
    models: dict[str, None] = {}
    # Inner products name every slot of a policy, in the writer's order; other numbers may leave some out.
    for meaning in sorted(meanings, key=lambda meaning: "slot_b" not in meaning.labels):
        role, slot, policy = (meaning.labels.get(name, "") for name in ("role", "slot", "policy"))
        if "dataset" in meaning.labels:
            continue  # an evaluation's role may be one without a row of its own
        if role or slot:
            slots.setdefault(slot or role, role or slot.split("/")[0])
        if policy:
            models[policy] = None
        if policy and (slot or role) and _is_own(meaning):
            known.setdefault(slot or role, policy)
        if role and not policy and meaning.metric == "grad_norm":
            known.setdefault(role, role)
    for policy in models:
        if policy not in known.values():
            slots.setdefault(policy, policy)
            known.setdefault(policy, policy)
    known |= {slot: dialect.policies[role] for slot, role in slots.items() if role in dialect.policies}
    if not slots:
        slots = {ALONE: ALONE}
        known = {ALONE: ALONE}
    assumed = tuple(slot for slot in slots if slot not in known)
    return Roster(slots, {slot: known.get(slot, ALONE) for slot in slots}, assumed)


def _is_own(meaning: Meaning) -> bool:
    """Returns whether a key with a slot and a policy says that the slot trains the policy."""
    return meaning.labels.get("slot_b", meaning.labels.get("slot")) == meaning.labels.get("slot")
