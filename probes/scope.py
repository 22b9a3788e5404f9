"""The scope that `attach` returns: rows in, one update record out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from gradscope.errors import ProbeError, nearest
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.agreement import Agreed, agree, standing_of
from gradscope.probes.attribution import Attribution
from gradscope.probes.attribution.attributor import Attributor, Pending
from gradscope.probes.attribution.rules import underlying
from gradscope.probes.cells import Cells, check_labels
from gradscope.probes.checkpointing import bind_checkpointing
from gradscope.probes.distributed import Processes
from gradscope.probes.evidence.gathering import Gathering
from gradscope.probes.evidence.settings import Evidence
from gradscope.probes.halves import Halves, first_half
from gradscope.probes.record import check_policy_without_rows, make_record
from gradscope.probes.reduction import Reduction
from gradscope.probes.row_input import read_rows
from gradscope.probes.rows import RowBatch
from gradscope.probes.scaling import Scales, read_scales
from gradscope.probes.taps.capture import Collector
from gradscope.probes.taps.placing import place
from gradscope.probes.taps.pure import check_one_slot
from gradscope.probes.targets import Layout
from gradscope.probes.verify import Verification, compare_with_masked_loss, untouched
from gradscope.runfile.update import UpdateRecord


class Scope:
    """Slot gradients of a model between optimizer steps; made by `attach`.

    As a context manager it detaches on leaving.

    Attributes:
        model: The probed model.
        slots: Slot -> role.
        labels: The declared labels.
        coverage: Trainable parameters that no tap covers, with the reason; those with a hook of their own are
            measured in updates whose micro-batches hold one slot each.
        residuals: Policy -> relative gap between the sum of the slot gradients and autograd's gradient in the
            last update; NaN when that gradient was not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Mapping[str, str],
        layout: Layout,
        *,
        labels: Sequence[str] = (),
        attribution: Attribution | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        self.model = model
        self.slots = dict(slots)
        self.labels = check_labels(labels, len(self.slots))
        self.coverage = layout.reasons | {one.name: one.reason for one in layout.hooked}
        self.residuals: dict[str, float] = {}
        self._layout = layout
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._waiting: dict[str, list[RowBatch]] = {policy: [] for policy in layout.policies}
        self._largest_norm = dict.fromkeys(layout.policies, 0.0)
        self._processes = Processes(model, layout)
        self._halves = self._fresh_halves()
        self._policy_of_slot = {
            slot: policy.name for policy in layout.policies.values() for slot in policy.slots
        }
        self._gathering = Gathering(layout, evidence or Evidence())
        self._collector = Collector(self._fresh_sums())
        self._collector.row_meter = self._gathering.row_meter
        self._handles = [*place(model, layout, self._collector), self._processes]
        self._undo_checkpointing = bind_checkpointing(self._collector)
        settings = attribution or Attribution()
        self._attributor = (
            Attributor(self.slots, self._collector.sums, settings) if settings.enabled else None
        )

    @property
    def attached(self) -> bool:
        """Whether the scope still measures; False after `detach` and after `step` raised."""
        return bool(self._handles)

    @property
    def backward_seconds(self) -> float:
        """Host time spent on slot gradients inside backward passes since `attach`."""
        return self._collector.seconds

    @property
    def waiting(self) -> tuple[str, ...]:
        """Policies with rows since their last `step`; the others have no update to measure."""
        return tuple(policy for policy, batches in self._waiting.items() if batches)

    @property
    def attribution_reasons(self) -> dict[str, str]:
        """Policy -> why its last update could not be attributed; without those where it could."""
        return {} if self._attributor is None else dict(self._attributor.reasons)

    @contextmanager
    def rows(
        self,
        slot_of_each_row: Sequence[str | None],
        problems: Sequence[Hashable] | None = None,
        row_ids: Sequence[Hashable] | None = None,
        *,
        tokens: Sequence[float] | None = None,
        advantages: Sequence[float] | None = None,
        loss_weights: Sequence[float] | None = None,
        packed: bool | None = None,
        labels: Sequence[str | None] | None = None,
    ) -> Iterator[None]:
        """Announces the rows of one micro-batch: forward pass inside the block, backward anywhere.

        The slots are exact only if each slot's loss depends on its own rows alone, and no row carries two
        slots. Everything is a plain sequence on the host with one entry for each row: no device waits for it.
        For packed rows (`[1, T, ...]`) an entry stands for each token, and `row_ids` tell neighbouring rows
        of one slot apart.

        Rows that the loop spares a forward pass since their loss is zero may be announced in an empty block.

        Args:
            slot_of_each_row: Slot name of each row that enters the model, in its order; None for a row of no
                slot whose loss is zero, such as padding.
            problems: Problem of each row, None where it is not known; gives `gram_cross`.
            row_ids: Name of each row.
            tokens: Number of scored tokens of each row; fills `num_tokens`.
            advantages: Advantage of each row; fills `num_signal_rows` and `advantage_abs_sum`.
            loss_weights: Weight of each row in the loss; fills `loss_weight`.
            packed: Whether an entry stands for a token, for a block without a forward pass, whose shape would
                show it; None takes repeated `row_ids` for a sign that it does.
            labels: Label of each row, one of those declared in `attach`.

        Raises:
            ProbeError: An unknown slot or label, sequences of different lengths, a block within a block, or a
                scope that is detached.
        """
        self._require_attached("rows")
        if self._collector.batch is not None:
            raise ProbeError("rows(): already inside a rows() block; leave it before the next micro-batch.")
        numbers = {"tokens": tokens, "advantages": advantages, "loss_weights": loss_weights}
        with self._told_to_other_ranks():
            self._processes.prepare()
            batch = read_rows(
                slot_of_each_row,
                self._index,
                problems=problems,
                row_ids=row_ids,
                numbers=numbers,
                packed=packed,
                labels=labels,
                known_labels=self.labels,
                half_of=lambda slot, problem: self._halves[self._policy_of_slot[slot]].of(problem),
            )
            if self._layout.mode == "pure":
                check_one_slot(batch)
            if self._collector.row_meter is not None:
                self._gathering.begin(batch, problems)
            for name, sums in self._collector.sums.items():
                if batch.slots.isdisjoint(self._layout.policies[name].slots):
                    continue
                if sums.closed:
                    self._forget(name)
                if batch.halved:
                    sums.halve()
        self._collector.batch = batch
        try:
            yield
        finally:
            self._collector.batch = None
        # Reached only without an exception: a micro-batch whose forward failed is not counted.
        for name, policy in self._layout.policies.items():
            if not batch.slots.isdisjoint(policy.slots):
                self._waiting[name].append(batch)

    def step(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> UpdateRecord | list[UpdateRecord]:
        """Returns the record of the update that `optimizer` is about to make, and starts the next.

        Call it after the last backward of the update, before clipping and `optimizer.step()`. What was
        applied fills in while the optimizer steps.

        Args:
            optimizer: The optimizer that will step.
            scaler: The loss scaler, where there is one; all numbers are then in units of the unscaled loss,
                whether its `unscale_` was called already or not.

        Returns:
            One record; a list, one for each policy that had rows, when the optimizer drives several policies.

        Raises:
            ProbeError: Nothing was announced since the last step (the scope stays attached), or the
                measurement failed or does not add up to autograd's gradient: the scope is detached, gradients
                and weights are untouched, and training can go on without it.
        """
        self._require_attached("step")
        optimizer = underlying(optimizer)
        try:
            reduction, sums = self._processes.find_reduction(), self._collector.sums
            self._use(reduction)
        except ProbeError:
            self.detach()
            raise
        self._make_room(optimizer)
        self._collector.settle()
        standing = standing_of(
            optimizer, self._layout, sums, self._waiting, self._halves, self._collector.failure
        )
        try:
            agreed = agree(standing, reduction, sums)
            ready = [name for name, policy in agreed.items() if policy.announced]
            for name in agreed if ready else ():
                if name not in ready:
                    check_policy_without_rows(self._collector.sums[name])
            scales = read_scales(scaler, optimizer) if ready else Scales()
            updates = [self._close(name, optimizer, agreed[name], scales) for name in ready]
        except ProbeError:
            self.detach()
            raise
        if not ready:
            raise ProbeError(
                f"step(): no rows of policy {', '.join(agreed)} since its last step; run the forward pass "
                "inside `with scope.rows(...)`."
            )
        if self._attributor is not None:
            self._attributor.expect(optimizer, updates)
        records = [update.record for update in updates]
        return records if len(agreed) > 1 else records[0]

    def slot_gradients(self, slot: str) -> dict[str, torch.Tensor]:
        """Returns copies of a slot's gradients so far in this update, by parameter name.

        Raises:
            ProbeError: An unknown slot, a scope that is detached, or a measurement that failed.
        """
        self._require_attached("slot_gradients")
        if slot not in self._index:
            raise ProbeError(
                f"slot_gradients(): unknown slot '{slot}'.{nearest(slot, self.slots)} "
                f"Allowed: {', '.join(self.slots)}."
            )
        if self._collector.failure is not None:
            raise ProbeError(self._collector.failure)
        index = self._index[slot]
        policy = next(p for p in self._layout.policies.values() if index in p.slots)
        return self._collector.sums[policy.name].gradients(policy.slots.index(index))

    def verify(
        self,
        loss_of_rows: Callable[[torch.Tensor], torch.Tensor],
        slot_of_each_row: Sequence[str | None],
        *,
        slot: str | None = None,
    ) -> Verification:
        """Compares one slot's gradient with the backward of a loss in which only that slot's rows count.

        The only check that sees rows announced under the wrong slot, and a slot's loss that depends on
        another slot's rows. `loss_of_rows` does what the loop does, its `with scope.rows(...)` included,
        since that is what is tested; `slot_of_each_row` comes from where the loop knows it from first hand:

            def loss_of_rows(mask):
                with scope.rows(batch.slots):
                    losses = loss_fn(model(**batch.tensors))  # one for each row
                return (losses * mask).sum()

            scope.verify(loss_of_rows, [sample.slot for sample in samples])

        It costs two forward and backward passes. Gradients, random numbers and rows waiting for `step` are as
        before when it returns or raises.

        Args:
            loss_of_rows: Loss of the rows where the mask (bool, `[N]`, on the CPU) is True, weighted as in
                the total loss; called with all rows, then with one slot's.
            slot_of_each_row: The true slot of each entry of the mask.
            slot: The slot to compare; None takes the one with the largest gradient.

        Raises:
            ProbeError: The gradients differ by more than the square root of the precision of their type, or
                nothing was measured.
        """
        self._require_attached("verify")
        truth = read_rows(slot_of_each_row, self._index, problems=None, row_ids=None, numbers={})
        if slot is not None and self._index.get(slot) not in truth.slots:
            raise ProbeError(f"verify(): slot '{slot}' has no rows among those given.")
        with untouched(self.model), self._aside():
            chosen = None if slot is None else self._index[slot]
            return compare_with_masked_loss(self.model, loss_of_rows, truth, chosen, self._collector)

    def detach(self) -> None:
        """Removes every hook and frees the sums; the model is as before `attach`. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._undo_checkpointing()
        if self._attributor is not None:
            self._attributor.close()
        self._collector.sums.clear()
        for batches in self._waiting.values():
            batches.clear()

    def __enter__(self) -> Scope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    @contextmanager
    def _told_to_other_ranks(self) -> Iterator[None]:
        """Lets what goes wrong in a block on one process end the next step on all: they would wait for it."""
        try:
            yield
        except Exception as error:
            if self._processes.several:
                self._collector.fail(str(error))
            raise

    def _use(self, reduction: Reduction) -> None:
        for sums in self._collector.sums.values():
            sums.reduction = reduction
            sums.eps = max(sums.eps, reduction.eps)

    def _close(
        self, policy: str, optimizer: torch.optim.Optimizer, agreed: Agreed, scales: Scales
    ) -> Pending:
        sums = self._collector.sums[policy]
        sums.rescale(scales)
        record, summary = make_record(
            sums,
            self._waiting[policy],
            tuple(self.slots),
            optimizer,
            labels=self.labels,
            reference_norm=self._largest_norm[policy],
            agreed=agreed,
        )
        if agreed.conflict:
            self._halves[policy].go_by_name()
            self._processes.warn(f"gram_cross of an update of policy '{policy}' is NaN: {agreed.conflict}.")
        self.residuals[policy] = summary.residual
        self._largest_norm[policy] = max(self._largest_norm[policy], summary.finite_norm)
        self._gathering.close(sums, self._waiting[policy], record)
        self._waiting[policy] = []
        self._halves[policy].clear()
        self._collector.arrivals.clear()
        if scales.sums != 1 and not math.isfinite(summary.grad_norm):
            record.scalars["skipped"] = 1.0  # the scaler will leave the step out
        sums.close()
        return Pending(record, sums, summary.finite_norm)

    def _make_room(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets the updates before this one of the policies that an optimizer drives."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, sums in self._collector.sums.items():
            if sums.closed and any(id(parameter) in held for parameter in sums.policy.covered.values()):
                self._forget(name)

    def _forget(self, policy: str) -> None:
        """Makes room for the next update; what the optimizer has not done by now is not attributed."""
        if self._attributor is not None:
            self._attributor.abandon(policy)
        self._collector.sums[policy].reset()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Puts the sums and rows of the current update aside for the duration of a block."""
        kept, waiting, failure = self._collector.sums, self._waiting, self._collector.failure
        halves, row_meter = self._halves, self._collector.row_meter
        self._collector.sums, self._collector.failure = self._fresh_sums(), None
        self._collector.row_meter = None
        suspicions, self._collector.suspicions = self._collector.suspicions, []
        self._waiting = {policy: [] for policy in waiting}
        self._halves = self._fresh_halves()
        try:
            yield
        finally:
            self._collector.sums, self._waiting, self._collector.failure = kept, waiting, failure
            self._halves, self._collector.row_meter = halves, row_meter
            self._collector.suspicions = suspicions

    def _require_attached(self, call: str) -> None:
        if not self.attached:
            raise ProbeError(f"{call}(): the scope is detached; call attach() again to measure.")

    def _fresh_halves(self) -> dict[str, Halves]:
        return {policy: Halves(first_half()) for policy in self._layout.policies}

    def _fresh_sums(self) -> dict[str, SlotAccumulators]:
        return {
            name: SlotAccumulators(
                policy,
                Cells(policy.slots, len(self.slots), max(1, len(self.labels))),
                self._processes.reduction,
            )
            for name, policy in self._layout.policies.items()
        }
