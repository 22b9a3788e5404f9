"""What evidence is due in each update of a scope, and what comes of it: filled into the records.

Legend: K slots, R roles, C = R + 2 contributors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.attribution.ledger import Ledger
from gradscope.probes.evidence.applied import Applied, Keeper
from gradscope.probes.evidence.components import component_gram
from gradscope.probes.evidence.lora_changes import (
    LoraLayer,
    WeightChanges,
    change_grams,
    contributors,
    lora_layers,
    weight_changes,
)
from gradscope.probes.evidence.modules import module_evidence
from gradscope.probes.evidence.row_meter import RowMeter
from gradscope.probes.evidence.row_records import joined, rows_of_batch
from gradscope.probes.evidence.settings import Evidence, is_due
from gradscope.probes.evidence.spike import SpikeWatch
from gradscope.probes.reduction import Reduction
from gradscope.probes.rows import RowBatch
from gradscope.probes.targets import Layout
from gradscope.runfile.evidence import RowEvidence
from gradscope.runfile.update import UpdateRecord


@dataclass
class Standing:
    """Where one policy stands.

    Attributes:
        num_updates: Updates so far.
        watch: Recent gradient norms.
        spiked: Whether the last update's norm had jumped.
        components: Part of the loss -> sums of its gradients in the update in progress.
        step: The last update whose applied changes were kept, with its record.
        weight_changes: What it changed in LoRA layers, and the number of the update.
    """

    num_updates: int = 0
    watch: SpikeWatch = field(default_factory=SpikeWatch)
    spiked: bool = False
    components: dict[str, SlotAccumulators] = field(default_factory=dict)
    step: tuple[UpdateRecord, Applied] | None = None
    weight_changes: tuple[int, list[WeightChanges]] | None = None


class Gathering:
    """Fills the evidence of records.

    Args:
        model: The probed model.
        layout: What the scope measures.
        slots: Slot -> role.
        settings: What is asked for.

    Raises:
        ProbeError: Rows are asked for where no module is tapped.

    Attributes:
        row_meter: What the taps call; None where rows are never asked for.
        policies: Policy -> where it stands.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, slots: Mapping[str, str], settings: Evidence
    ) -> None:
        self.settings = settings
        measures_rows = settings.rows_every > 0 or settings.top_rows > 0
        if measures_rows and not layout.targets:
            raise ProbeError(
                "attach(): Evidence asks for single rows, but every parameter has a hook of its own, which "
                "sees none; take another mode than 'pure', or rows_every=0 and top_rows=0."
            )
        self.row_meter = RowMeter(layout, settings) if measures_rows else None
        self.policies = {policy: Standing() for policy in layout.policies}
        self._layout = layout
        self._roles = tuple(dict.fromkeys(slots.values()))
        self._lora: dict[str, list[LoraLayer]] = {
            name: lora_layers(model, policy) for name, policy in layout.policies.items()
        }

    def begin(self, batch: RowBatch) -> None:
        """Has the rows of a micro-batch measured, if they are to be.

        Raises:
            ProbeError: It has no row ids.
        """
        if self.row_meter is None:
            return
        if batch.row_ids is None:
            raise ProbeError(
                "rows(): Evidence keeps single rows, which are found by their ids; give row_ids."
            )
        policies = [p for p in self._layout.policies.values() if not batch.slots.isdisjoint(p.slots)]
        whole = any(self._rows_due(policy.name) for policy in policies)
        if whole or self.settings.top_rows:
            self.row_meter.begin(batch, sketches=whole)

    def close(
        self, sums: SlotAccumulators, batches: Sequence[RowBatch], record: UpdateRecord, *, scale: float
    ) -> None:
        """Fills in what can be told of an update before the optimizer steps.

        Args:
            sums: The sums of its policy.
            batches: Its micro-batches.
            record: Its record, otherwise complete.
            scale: Factor that brings what was measured in backward passes to the units of the loss.
        """
        own = self.policies[record.policy]
        rows_due, own.step = self._rows_due(record.policy), None
        own.spiked = own.watch.update(record.scalars["grad_norm"])
        modules_due = is_due(self.settings.modules_every, own.num_updates)
        if modules_due or (own.spiked and self.settings.modules_every):
            record.modules = module_evidence(sums, record, whole=self.settings.module_gram)
        if self.row_meter is not None and (rows_due or self.settings.top_rows):
            record.rows = self._rows(sums, batches, None if rows_due else self.settings.top_rows, scale)
        if any(not part.empty for part in own.components.values()):
            there = [slot for slot in sums.policy.slots if not np.isnan(record.gram[slot, slot])]
            record.components = component_gram(own.components, record.slots, there)
            record.counts.update(record.components.by_slot())
        own.components = {}
        own.num_updates += 1

    def keeper(
        self, record: UpdateRecord, ledger: Ledger, labels: Sequence[str], reduction: Reduction
    ) -> Keeper | None:
        """Returns what keeps the changes that the optimizer is about to make; None where nobody needs them.

        Args:
            record: Of the update.
            ledger: Momenta of its policy.
            labels: Role of each part.
            reduction: What this process accounts for; with several processes nothing is kept, since none has
                whole matrices.
        """
        number = self.policies[record.policy].num_updates - 1
        wanted = is_due(self.settings.influence_every, number) or (
            record.modules is not None and self._lora[record.policy]
        )
        return Keeper(ledger, labels, reduction) if wanted and reduction.size == 1 else None

    def take(self, record: UpdateRecord, applied: Applied) -> None:
        """Fills in what can be told of the changes that the optimizer made."""
        own = self.policies[record.policy]
        if is_due(self.settings.influence_every, own.num_updates - 1):
            own.step = (record, applied)
        if record.modules is None or not self._lora[record.policy]:
            return
        changes = weight_changes(self._lora[record.policy], applied)
        own.weight_changes = (own.num_updates, changes)
        others = self._changes_beside(record.policy)
        grams = change_grams(changes, others)
        names = (*contributors(changes), *contributors(others))
        found = np.full((len(record.modules.modules), len(names), len(names)), np.nan)
        for at, module in enumerate(record.modules.modules):
            if module in grams:
                found[at] = grams[module]
        record.modules = replace(record.modules, change_gram=found, contributors=names)

    def state(self) -> dict[str, Any]:
        """Returns where the schedules stand, for a checkpoint: numbers and names only."""
        return {
            name: {"num_updates": own.num_updates, "spiked": own.spiked, "log_norms": own.watch.state()}
            for name, own in self.policies.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; policies that it does not know begin anew."""
        for name in self.policies.keys() & state.keys():
            own, found = self.policies[name], state[name]
            own.num_updates, own.spiked = int(found["num_updates"]), bool(found["spiked"])
            own.watch.load(found["log_norms"])

    def forget(self, policy: str) -> None:
        """Frees what was kept of a policy's last step: the next is beginning."""
        self.policies[policy].step = None

    def _changes_beside(self, policy: str) -> list[WeightChanges]:
        """Returns what the roles of other policies changed in their update of the same number."""
        own = self.policies[policy]
        assert own.weight_changes is not None
        taken = set(contributors(own.weight_changes[1]))
        found = []
        for name, other in self.policies.items():
            if name == policy or other.weight_changes is None or other.num_updates != own.num_updates:
                continue
            number, groups = other.weight_changes
            roles = [role for role in contributors(groups) if role in self._roles and role not in taken]
            if number == own.num_updates and roles:
                taken.update(roles)
                found += [WeightChanges(g.modules, {role: g.changes[role] for role in roles}) for g in groups]
        return found

    def _rows_due(self, policy: str) -> bool:
        every, own = self.settings.rows_every, self.policies[policy]
        return is_due(every, own.num_updates) or (every > 0 and own.spiked)

    def _rows(
        self, sums: SlotAccumulators, batches: Sequence[RowBatch], top: int | None, scale: float
    ) -> RowEvidence | None:
        assert self.row_meter is not None
        divisors = {sums.reduction.divisor(parameter) for parameter in sums.policy.covered.values()}
        if len(divisors) > 1:
            return None  # a row's gradient has no one scale
        scale, found = scale / divisors.pop(), []
        for batch in batches:
            numbers = self.row_meter.finish(batch)
            if numbers is not None:
                own = rows_of_batch(batch, numbers, sums.policy.slots, scale=scale)
                found.append(own)
        mine = joined(found, top=top) if found else None
        every = [part for part in sums.reduction.gather(mine) if part is not None]
        return joined(every, top=top) if every else None
