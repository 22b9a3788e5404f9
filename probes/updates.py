"""The update in progress of every policy: from its first rows until the optimizer stepped."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.agreement import Agreed, Standing, agree, standing_of
from gradscope.probes.attribution.attributor import Attributor, Pending
from gradscope.probes.attribution.settings import Attribution
from gradscope.probes.cells import Cells
from gradscope.probes.distributed import Processes
from gradscope.probes.evidence.gathering import Gathering
from gradscope.probes.evidence.settings import Evidence
from gradscope.probes.halves import Halves, first_half
from gradscope.probes.order import StepOrder
from gradscope.probes.record import check_policy_without_rows, make_record
from gradscope.probes.reduction import Reduction
from gradscope.probes.resuming import go_on, state_of
from gradscope.probes.rows import RowBatch
from gradscope.probes.scaling import Scales, read_scales
from gradscope.probes.strangers import check_still_there, driven_by, find_strangers, told_of_strangers
from gradscope.probes.taps.capture import Collector
from gradscope.probes.targets import Layout
from gradscope.runfile.update import UpdateRecord


class Updates:
    """What belongs to the updates that have not been made yet.

    Args:
        model: The probed model.
        slots: Slot -> role.
        layout: What is measured.
        labels: The declared labels.
        attribution: How applied changes are attributed.
        evidence: How often modules and single rows are looked at.

    Attributes:
        collector: What taps share; holds the sums.
        processes: The other processes, where there are any.
        attributor: Follows the optimizers.
        gathering: Fills in what else records hold.
        order: Sees optimizers that step too early.
        residuals: Policy -> relative gap of the last update's sum check.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Mapping[str, str],
        layout: Layout,
        *,
        labels: Sequence[str],
        attribution: Attribution,
        evidence: Evidence,
    ) -> None:
        self.residuals: dict[str, float] = {}
        self._model = model
        self._slots = tuple(slots)
        self._labels = tuple(labels)
        self._layout = layout
        self._waiting: dict[str, list[RowBatch]] = {policy: [] for policy in layout.policies}
        self.processes = Processes(model, layout)
        self._halves = self._fresh_halves()
        self._policy_of_slot = {
            slot: policy.name for policy in layout.policies.values() for slot in policy.slots
        }
        self.gathering = Gathering(model, layout, slots, evidence)
        self.collector = Collector(self.fresh_sums())
        self.collector.row_meter = self.gathering.row_meter
        self.attributor = Attributor(slots, self.collector.sums, attribution, self.gathering)
        self.order = StepOrder(self._unseen_policy, self.collector.fail, self.processes.warn)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Policies with rows since their last update."""
        return tuple(policy for policy, batches in self._waiting.items() if batches)

    @property
    def num_bytes(self) -> int:
        """Memory of the sums and of what attribution keeps."""
        sums = [block.sums for sums in self.collector.sums.values() for block in sums.blocks]
        return sum(tensor.nbytes for tensor in (*sums, *self.attributor.tensors()))

    def half_of(self, slot: int, problem: Hashable) -> int:
        """Returns the half of a problem in the update of a slot's policy."""
        return self._halves[self._policy_of_slot[slot]].of(problem)

    def begin(self, batch: RowBatch) -> None:
        """Makes room for the rows of a micro-batch."""
        if self.collector.row_meter is not None:
            self.gathering.begin(batch)
        for name, sums in self.collector.sums.items():
            if batch.slots.isdisjoint(self._layout.policies[name].slots):
                continue
            if sums.closed:
                self._forget(name)
            if batch.halved:
                sums.halve()

    def add(self, batch: RowBatch) -> None:
        """Counts the rows of a micro-batch in, whose forward pass did not fail."""
        for name, policy in self._layout.policies.items():
            if not batch.slots.isdisjoint(policy.slots):
                self._waiting[name].append(batch)
        if batch.repeats_ids:
            self.processes.warn(
                "rows(): rows of one micro-batch have the same row id, which then leads to none of them; "
                "give each row an id of its own."
            )

    @contextmanager
    def told_to_other_ranks(self) -> Iterator[None]:
        """Lets what goes wrong in a block on one process end the next step on all: they would wait for it."""
        try:
            yield
        except Exception as error:
            if self.processes.several:
                self.collector.fail(str(error))
            raise

    def find_processes(self) -> Reduction:
        """Learns with which other processes the work is shared, and returns how.

        Raises:
            ProbeError: It is shared in a way that cannot be probed.
        """
        known, reduction = self.processes.reduction, self.processes.find_reduction()
        if reduction is not known:
            self.attributor.restart()
        for sums in self.collector.sums.values():
            sums.reduction = reduction
            sums.eps = max(sums.eps, reduction.eps)
        return reduction

    def stand(self, optimizer: torch.optim.Optimizer) -> Standing:
        """Returns where this process stands before the step of an optimizer.

        Raises:
            ProbeError: The optimizer drives no policy, on the only process there is.
        """
        self._make_room(optimizer)
        self.collector.settle()
        strangers = find_strangers(self._model, optimizer, self._layout)
        if strangers:
            self.processes.warn(told_of_strangers(strangers))
        return standing_of(
            optimizer,
            self._layout,
            self.collector.sums,
            self._waiting,
            self._halves,
            self.collector.failure,
        )

    def close(
        self,
        standing: Standing,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
    ) -> dict[str, UpdateRecord | None]:
        """Turns the sums of the policies that an optimizer drives into records.

        Returns:
            Policy -> record; None for a policy without rows.

        Raises:
            ProbeError: The measurement failed or does not add up to autograd's gradient.
        """
        sums = self.collector.sums
        agreed = agree(standing, self.processes.reduction, sums)
        ready = [name for name, policy in agreed.items() if policy.announced]
        for name in agreed if ready else ():
            if name not in ready:
                check_policy_without_rows(sums[name])
            elif not (agreed[name].tapped or agreed[name].has_gradient):
                check_still_there(self._model, self._layout.policies[name])
        scales = read_scales(scaler, optimizer) if ready else Scales()
        updates = [self._close(name, optimizer, agreed[name], scales) for name in ready]
        self.attributor.expect(optimizer, updates)
        if updates:
            self.order.expect(optimizer, scaler)
        for name in ready:
            if agreed[name].conflict:
                self.processes.warn(
                    f"gram_cross of an update of policy '{name}' is NaN: {agreed[name].conflict}."
                )
        return dict.fromkeys(agreed) | {one.record.policy: one.record for one in updates}

    def gradients(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns copies of a slot's gradients so far, by parameter name.

        Raises:
            ProbeError: The measurement failed.
        """
        if self.collector.failure is not None:
            raise ProbeError(self.collector.failure)
        sums = self.collector.sums[self._policy_of_slot[slot]]
        return sums.gradients(sums.policy.slots.index(slot))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Puts the sums and rows of the updates in progress aside for the duration of a block."""
        collector = self.collector
        kept = (collector.sums, collector.failure, collector.row_meter, collector.suspicions)
        waiting, halves = self._waiting, self._halves
        collector.sums, collector.failure, collector.row_meter = self.fresh_sums(), None, None
        collector.suspicions = []
        self._waiting = {policy: [] for policy in self._waiting}
        self._halves = self._fresh_halves()
        try:
            yield
        finally:
            collector.sums, collector.failure, collector.row_meter, collector.suspicions = kept
            self._waiting, self._halves = waiting, halves

    def state(self) -> dict[str, Any]:
        """Returns what a later run needs to go on, of this process."""
        return state_of(self.attributor, self.gathering, self.find_processes(), self.waiting)

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        go_on(self.attributor, self.gathering, self.find_processes(), state)

    def clear(self) -> None:
        """Frees the sums, and lets the optimizers go."""
        self.order.remove()
        self.attributor.close()
        self.collector.sums.clear()
        for batches in self._waiting.values():
            batches.clear()

    def _close(
        self, policy: str, optimizer: torch.optim.Optimizer, agreed: Agreed, scales: Scales
    ) -> Pending:
        sums = self.collector.sums[policy]
        sums.rescale(scales)
        record, summary = make_record(
            sums,
            self._waiting[policy],
            self._slots,
            optimizer,
            labels=self._labels,
            agreed=agreed,
        )
        if agreed.conflict:
            self._halves[policy].go_by_name()
        self.residuals[policy] = summary.residual
        self.gathering.close(sums, self._waiting[policy], record, scale=scales.sums)
        self._waiting[policy] = []
        self._halves[policy].clear()
        self.collector.arrivals.clear()
        if scales.sums != 1 and not math.isfinite(summary.grad_norm):
            record.scalars["skipped"] = 1.0  # the scaler will leave the step out
        sums.close()
        return Pending(record, sums, summary.added_norm(sums.eps))

    def _make_room(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets the updates before this one of the policies that an optimizer drives."""
        for policy in driven_by(optimizer, self._layout):
            if self.collector.sums[policy.name].closed:
                self._forget(policy.name)

    def _unseen_policy(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns a policy that an optimizer drives and that has rows since its last step; empty for none."""
        waiting = self.waiting
        found = driven_by(optimizer, self._layout) if waiting else []
        return next((policy.name for policy in found if policy.name in waiting), "")

    def _forget(self, policy: str) -> None:
        """Makes room for the next update; what the optimizer has not done by now is not attributed."""
        self.attributor.abandon(policy)
        self.gathering.forget(policy)
        self.collector.sums[policy].reset()

    def _fresh_halves(self) -> dict[str, Halves]:
        return {policy: Halves(first_half()) for policy in self._layout.policies}

    def fresh_sums(self) -> dict[str, SlotAccumulators]:
        """Returns empty sums for every policy."""
        return {
            name: SlotAccumulators(
                policy,
                Cells(policy.slots, len(self._slots), max(1, len(self._labels))),
                self.processes.reduction,
            )
            for name, policy in self._layout.policies.items()
        }
