"""Follows optimizers through their step hooks and fills the attribution of records in.

Legend: K slots, R roles of all policies, A parts (roles or slots) of one policy, M = R + 2 contributors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.attribution.account import Account
from gradscope.probes.attribution.ledger import Ledger
from gradscope.probes.attribution.reasons import reason_against
from gradscope.probes.attribution.result import Result, among_slots, by_label
from gradscope.probes.attribution.rules import Rule, find_rule
from gradscope.probes.attribution.saving import load_ledger, save_ledger
from gradscope.probes.attribution.settings import Attribution
from gradscope.probes.evidence.applied import Keeper
from gradscope.probes.evidence.gathering import Gathering
from gradscope.runfile.update import UpdateRecord

Array = NDArray[np.float64]


@dataclass
class Pending:
    """A record that waits for the optimizer, its closed sums, and the norm to judge rounding by."""

    record: UpdateRecord
    sums: SlotAccumulators
    reference_norm: float


@dataclass
class Watched:
    """What is known of an optimizer with our hooks on it, and the accounts of the step that it is in."""

    rule: Rule
    handles: tuple[RemovableHandle, ...]
    accounts: dict[str, Account] = field(default_factory=dict)


Hook = Callable[[torch.optim.Optimizer, Watched, bool], None]
"""Takes an optimizer, what is known of it, and whether its step computes the gradient anew."""


class Attributor:
    """Keeps every policy's ledger.

    Args:
        slots: Slot -> role.
        sums: Policy -> sums, as the scope has them now.
        settings: How to attribute.
        evidence: Takes the contributions of steps that it looks at.

    Attributes:
        reasons: Policy -> why its last update has no attribution.
        seconds: Host time spent in the hooks of optimizers.
    """

    def __init__(
        self,
        slots: Mapping[str, str],
        sums: Mapping[str, SlotAccumulators],
        settings: Attribution,
        evidence: Gathering,
    ) -> None:
        self.reasons: dict[str, str] = {}
        self.seconds = 0.0
        self._slots = dict(slots)
        self._roles = tuple(dict.fromkeys(slots.values()))
        self._sums = sums
        self._settings = settings
        self._evidence = evidence
        self._ledgers: dict[str, Ledger] = {}
        self._pending: dict[str, Pending] = {}
        self._watched: WeakKeyDictionary[torch.optim.Optimizer, Watched] = WeakKeyDictionary()

    def expect(self, optimizer: torch.optim.Optimizer, updates: Sequence[Pending]) -> None:
        """Waits for an optimizer that is about to make updates."""
        if not self._settings.enabled:
            return
        rule = find_rule(optimizer)
        if isinstance(rule, str):
            for update in updates:
                self._give_up(update.record.policy, update.record, rule)
            return
        self._pending |= {update.record.policy: update for update in updates}
        for update in updates:
            update.record.pending = True
        self._watch(optimizer, rule)

    def abandon(self, policy: str) -> None:
        """Gives the update that waits up: its optimizer did not step, or what it left is about to go."""
        pending = self._pending.pop(policy, None)
        if pending is not None:
            pending.record.scalars.setdefault("skipped", 1.0)
            self._give_up(policy, pending.record, "the optimizer did not step")

    def tensors(self) -> list[torch.Tensor]:
        """Returns every tensor that is held."""
        return [tensor for ledger in self._ledgers.values() for tensor in ledger.tensors()]

    def state(self) -> dict[str, Any]:
        """Returns what a later run needs to go on: tensors, numbers and names only."""
        return {name: save_ledger(ledger, self._part_names(name)) for name, ledger in self._ledgers.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; policies without one start from what the optimizer then has.

        Raises:
            ProbeError: It is of other policies, parts, parameters or shapes.
        """
        loaded = {}
        for name, content in state.items():
            if name not in self._sums:
                known = ", ".join(self._sums)
                raise ProbeError(f"load_state_dict(): unknown policy '{name}'. Allowed: {known}.")
            loaded[name] = load_ledger(self._make_ledger(name), content, self._part_names(name))
        self._ledgers |= loaded

    def restart(self) -> None:
        """Forgets all momenta: those of other parts of the parameters are to be kept from now on."""
        self._ledgers.clear()

    def close(self) -> None:
        """Removes every hook and frees what is held."""
        for watched in self._watched.values():
            for handle in watched.handles:
                handle.remove()
        self._watched.clear()
        self._pending.clear()
        self._ledgers.clear()

    def _watch(self, optimizer: torch.optim.Optimizer, rule: Rule) -> None:
        if optimizer not in self._watched:
            handles = (
                optimizer.register_step_pre_hook(self._guarded(self._before)),
                optimizer.register_step_post_hook(self._guarded(self._after)),
            )
            self._watched[optimizer] = Watched(rule, handles)

    def _guarded(self, hook: Hook) -> Callable[..., None]:
        """Returns a hook that never disturbs the optimizer: what fails is the reason for no attribution."""

        def run(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            begin, given = time.perf_counter(), [*args[1:], *kwargs.values()]
            try:
                with torch.no_grad():
                    hook(optimizer, self._watched[optimizer], any(map(callable, given)))
            except Exception as error:
                self._fail(optimizer, f"{type(error).__name__}: {error}")
            self.seconds += time.perf_counter() - begin

        return run

    def _before(self, optimizer: torch.optim.Optimizer, watched: Watched, with_closure: bool) -> None:
        """Takes the account of every policy that the optimizer is about to move."""
        watched.accounts.clear()
        moved = self._held_by(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler for fused optimizers
        if found_inf is not None and bool(found_inf):
            for name in moved:
                self.abandon(name)
            return
        for name in moved:
            sums, pending = self._sums[name], self._pending.get(name)
            has_gradient = any(p.grad is not None for p in sums.policy.covered.values())
            wanted = has_gradient and (pending is not None or name in self._ledgers)
            announced = sums.reduction.unanimous(wanted and pending is not None)
            if not announced and not sums.reduction.unanimous(wanted and pending is None):
                continue
            watched.accounts[name] = Account(
                sums.reduction.together(partial(self._ledger, name)),
                sums,
                watched.rule,
                optimizer,
                reference_norm=0.0 if pending is None else pending.reference_norm,
                announced=announced,
                usable=not sums.left_out and not with_closure,
            )

    def _held_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [
            name
            for name, sums in self._sums.items()
            if any(id(p) in held for p in sums.policy.covered.values())
        ]

    def _after(self, optimizer: torch.optim.Optimizer, watched: Watched, with_closure: bool) -> None:
        """Settles the accounts and fills in the records."""
        for name, account in watched.accounts.items():
            pending = self._pending.pop(name, None)
            keeper = None
            if pending is not None:
                keeper = account.sums.reduction.together(partial(self._keeper, pending, account))
            result = account.settle(() if keeper is None else keeper.buffers)
            reason = reason_against(account.sums, account.ledger, result, with_closure=with_closure)
            drifted = not result.drift <= max(math.sqrt(account.sums.eps), account.ledger.rounding)
            if reason or drifted:
                account.resync()
            if pending is not None:
                self._fill(pending, account, result, reason)
                if keeper is not None and not reason:
                    self._evidence.take(pending.record, keeper.applied())
        watched.accounts.clear()

    def _keeper(self, pending: Pending, account: Account) -> Keeper | None:
        """Returns what keeps the contributions themselves, where evidence needs them."""
        slots, roles = account.sums.cells.slots, list(self._slots.values())
        role_of_part = {part: roles[slot] for slot, part in zip(slots, self._parts(slots), strict=True)}
        labels = [role_of_part[part] for part in range(account.ledger.num_parts)]
        return self._evidence.keeper(pending.record, account.ledger, labels, account.sums.reduction)

    def _fill(self, pending: Pending, account: Account, result: Result, reason: str) -> None:
        record, cells = pending.record, account.sums.cells
        record.pending = False
        there = {slot for slot in cells.slots if not np.isnan(record.gram[slot, slot])}
        record.scalars["update_norm"] = result.change_norm
        record.scalars.setdefault("skipped", 0.0)
        for name, dots in (("dot_previous_update", result.dot_previous), ("dot_ema", result.dot_mean)):
            record.counts[name] = among_slots(dots, cells.slots, there, len(self._slots))
        if reason:
            self._give_up(record.policy, record, reason)
            return
        self.reasons.pop(record.policy, None)
        num_parts = account.ledger.num_parts
        record.scalars["decay_norm"] = math.sqrt(result.products[num_parts, num_parts])
        record.scalars.setdefault("clip_factor", result.factor)
        record.attribution_residual = result.residual
        role_of_slot = [self._roles.index(role) for role in self._slots.values()]
        parts = self._parts(cells.slots)
        role_of_part = {part: role_of_slot[slot] for slot, part in zip(cells.slots, parts, strict=True)}
        record.update_gram, record.effect = by_label(
            result,
            [role_of_part[part] for part in range(num_parts)],
            {role_of_slot[slot] for slot in there},
            len(self._roles),
        )
        if self._settings.by == "slot":
            record.slot_update_gram, record.slot_effect = by_label(
                result, cells.slots, there, len(self._slots)
            )

    def _give_up(self, policy: str, record: UpdateRecord, reason: str) -> None:
        record.pending = False
        self.reasons[policy] = record.attribution_reason = reason

    def _fail(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Forgets what may be half done; the next step starts from what the optimizer then has."""
        self._watched[optimizer].accounts.clear()
        for name in self._held_by(optimizer):
            self._ledgers.pop(name, None)
            pending = self._pending.pop(name, None)
            if pending is not None:
                self._give_up(name, pending.record, " ".join(reason.split())[:300])

    def _ledger(self, name: str) -> Ledger:
        if name not in self._ledgers:
            self._ledgers[name] = self._make_ledger(name)
        return self._ledgers[name]

    def _make_ledger(self, name: str) -> Ledger:
        sums = self._sums[name]
        return Ledger(sums, self._parts(sums.policy.slots), self._settings)

    def _part_names(self, policy: str) -> list[str]:
        slots = list(self._slots if self._settings.by == "slot" else self._slots.values())
        return list(dict.fromkeys(slots[slot] for slot in self._sums[policy].policy.slots))

    def _parts(self, policy_slots: Sequence[int]) -> list[int]:
        """Returns the number of each slot's part within the policy."""
        if self._settings.by == "slot":
            return list(range(len(policy_slots)))
        roles = [list(self._slots.values())[slot] for slot in policy_slots]
        order = list(dict.fromkeys(roles))
        return [order.index(role) for role in roles]
