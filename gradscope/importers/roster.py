"""Who takes part in an imported run: its slots, their roles, and the policies that they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradscope.errors import DataError
from gradscope.importers.dialect import Dialect, Meaning
from gradscope.importers.log import ForeignLog
from gradscope.importers.wording import listed
from gradscope.schema import TABLES

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

    def place(self, meaning: Meaning) -> tuple[object, ...]:
        """Returns what is equal for two keys that lead to one place of the run file."""
        variable = TABLES["updates"].variable(meaning.metric)
        policy = self.policy_of(meaning)
        if variable is None or variable.dims != ("update",) or policy is None:
            return meaning.place
        return (meaning.metric, policy, meaning.labels.get("minibatch", ""))

    def has_place(self, meaning: Meaning) -> bool:
        """Returns whether it is certain whose a key is."""
        update, train = (TABLES[table].variable(meaning.metric) for table in ("updates", "train"))
        if train is not None:
            return "slot" not in train.dims or self.slot_of(meaning) is not None
        return update is None or self.policy_of(meaning) is not None

    def slots_on(self, policy: str) -> tuple[str, ...]:
        """Returns the slots that train a policy."""
        return tuple(slot for slot, own in self.policies.items() if own == policy)


def roster(meanings: Sequence[Meaning], dialect: Dialect, log: ForeignLog, source: str) -> Roster:
    """Returns who takes part, from what the source says, the dialect knows and the keys name.

    A role with a gradient norm of its own has a policy of its own. Roles without one are put on one policy.

    Raises:
        DataError: Two roles on one policy have a gradient norm each; or it is open which slots train which of
            several policies.
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
    known |= {slot: dialect.policies[role] for slot, role in slots.items() if role in dialect.policies}
    _place_models(models, slots, known, source)
    if not slots:
        slots = {ALONE: ALONE}
        known = {ALONE: ALONE}
    assumed = tuple(slot for slot in slots if slot not in known)
    people = Roster(slots, {slot: known.get(slot, ALONE) for slot in slots}, assumed)
    _refuse_parts(meanings, people, source)
    return people


def _place_models(
    models: Mapping[str, None], slots: dict[str, str], known: dict[str, str], source: str
) -> None:
    """Finds the slots of policies that no key names together with a slot; one without any has its own name.

    Raises:
        DataError: There are several, and slots that may be on any of them.
    """
    free = [policy for policy in models if policy not in known.values()]
    open_slots = [slot for slot in slots if slot not in known]
    if free and open_slots:
        for slot in open_slots:
            if len(models) == 1:
                known[slot] = free[0]
            elif slot in free or slots[slot] in free:
                known[slot] = slot if slot in free else slots[slot]
        if any(slot not in known for slot in open_slots):
            raise DataError(
                f"{source}: does not say which of the policies {listed(free)} the slots {listed(open_slots)} "
                "train. Import the run itself, or an export of it (gradscope export RUN --to parquet)."
            )
    for policy in free:
        if policy not in known.values():
            slots.setdefault(policy, policy)
            known.setdefault(policy, policy)


def _refuse_parts(meanings: Sequence[Meaning], people: Roster, source: str) -> None:
    """Refuses gradient norms of several roles on one policy: it has one, of their sum."""
    roles: dict[str, list[str]] = {}
    for meaning in meanings:
        policy = people.policy_of(meaning)
        if meaning.metric == "grad_norm" and meaning.role and policy and "policy" not in meaning.labels:
            roles.setdefault(policy, []).append(meaning.role)
    for policy, own in roles.items():
        if len(set(own)) > 1:
            raise DataError(
                f"{source}: {listed(own)} have a gradient norm each but share the policy '{policy}', of "
                "which a run file holds one norm, that of their sum. Give them policies of their own, or "
                "leave the norms out."
            )


def _is_own(meaning: Meaning) -> bool:
    """Returns whether a key with a slot and a policy says that the slot trains the policy."""
    return meaning.labels.get("slot_b", meaning.labels.get("slot")) == meaning.labels.get("slot")
