"""The scope that `attach` returns: rows in, one update record out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gradscope.errors import ProbeError, nearest
from gradscope.probes.attribution.rules import underlying
from gradscope.probes.attribution.settings import Attribution
from gradscope.probes.cells import check_labels
from gradscope.probes.checkpointing import bind_checkpointing
from gradscope.probes.evidence.requests import Requests
from gradscope.probes.evidence.settings import Evidence
from gradscope.probes.row_input import read_rows
from gradscope.probes.taps.placing import place
from gradscope.probes.taps.pure import check_one_slot
from gradscope.probes.targets import Layout
from gradscope.probes.updates import Updates
from gradscope.probes.verify import Verification, compare_with_masked_loss, untouched
from gradscope.runfile.update import UpdateRecord


class Scope:
    """Slot gradients of a model between optimizer steps; made by `attach`.

    As a context manager it detaches on leaving.

    Attributes:
        model: The probed model.
        slots: Slot -> role.
        labels: The declared labels.
        evidence: What is measured when asked to: parts of the loss, influence.
        coverage: Trainable parameters that no tap covers, with the reason; those with a hook of their own are
            measured in updates whose micro-batches hold one slot each.
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
        self._layout = layout
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._updates = Updates(
            model,
            self.slots,
            layout,
            labels=self.labels,
            attribution=attribution or Attribution(),
            evidence=evidence or Evidence(),
        )
        self.evidence = Requests(model, layout, self.slots, self._updates)
        self._collector = self._updates.collector
        self._handles = [*place(model, layout, self._collector), self._updates.processes]
        self._undo_checkpointing = bind_checkpointing(self._collector)

    @property
    def attached(self) -> bool:
        """Whether the scope still measures; False after `detach` and after `step` raised."""
        return bool(self._handles)

    @property
    def backward_seconds(self) -> float:
        """Host time spent inside backward passes and inside the steps of optimizers since `attach`."""
        return self._collector.seconds + self._updates.attributor.seconds

    @property
    def waiting(self) -> tuple[str, ...]:
        """Policies with rows since their last `step`; the others have no update to measure."""
        return self._updates.waiting

    @property
    def residuals(self) -> dict[str, float]:
        """Policy -> relative gap of its last update's slot sum and autograd's gradient; NaN if not finite."""
        return dict(self._updates.residuals)

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors that the scope holds between backward passes."""
        return self._updates.num_bytes

    @property
    def attribution_reasons(self) -> dict[str, str]:
        """Policy -> why its last update could not be attributed; without those where it could."""
        return dict(self._updates.attributor.reasons)

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
        of one slot apart. Rows are axis 0: a time-major `[T, N, ...]` with T = N gives wrong slots unseen.
        Rows count also where their loss is dropped; those of zero loss may be announced in an empty block.

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
        with self._updates.told_to_other_ranks():
            self._updates.processes.prepare()
            batch = read_rows(
                slot_of_each_row,
                self._index,
                problems=problems,
                row_ids=row_ids,
                numbers=numbers,
                packed=packed,
                labels=labels,
                known_labels=self.labels,
                half_of=self._updates.half_of,
            )
            if self._layout.mode == "pure":
                check_one_slot(batch)
            self._updates.begin(batch)
        self._collector.batch = batch
        try:
            yield
        finally:
            self._collector.batch = None
        # Reached only without an exception: a micro-batch whose forward failed is not counted.
        self._updates.add(batch)

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
        with self._detached_on_failure():
            self._updates.find_processes()
        standing = self._updates.stand(optimizer)
        with self._detached_on_failure():
            records = self._updates.close(standing, optimizer, scaler)
        found = [record for record in records.values() if record is not None]
        if not found:
            raise ProbeError(
                f"step(): no rows of policy {', '.join(records)} since its last step; run the forward pass "
                "inside `with scope.rows(...)`."
            )
        return found if len(records) > 1 else found[0]

    def slot_gradients(self, slot: str) -> dict[str, torch.Tensor]:
        """Returns copies of a slot's gradients so far in this update, by parameter name.

        Raises:
            ProbeError: An unknown slot, a scope that is detached, or a measurement that failed.
        """
        self._require_attached("slot_gradients")
        if slot not in self._index:
            known = f"{nearest(slot, self.slots)} Allowed: {', '.join(self.slots)}."
            raise ProbeError(f"slot_gradients(): unknown slot '{slot}'.{known}")
        return self._updates.gradients(self._index[slot])

    def verify(
        self,
        loss_of_rows: Callable[[torch.Tensor], torch.Tensor],
        slot_of_each_row: Sequence[str | None],
        *,
        slot: str | None = None,
    ) -> Verification:
        """Compares each slot's gradient with the backward of a loss in which only that slot's rows count.

        The only check that sees rows announced under the wrong slot, and a slot's loss that depends on
        another slot's rows. `loss_of_rows` does what the loop does, its `with scope.rows(...)` included,
        since that is what is tested; `slot_of_each_row` comes from where the loop knows it from first hand:

            def loss_of_rows(mask):
                with scope.rows(batch.slots):
                    losses = loss_fn(model(**batch.tensors))  # one for each row
                return (losses * mask).sum()

            scope.verify(loss_of_rows, [sample.slot for sample in samples])

        It costs a forward and backward pass of all rows, and one for each slot that is compared. Gradients,
        random numbers and rows waiting for `step` are as before when it returns or raises.

        Args:
            loss_of_rows: Loss of the rows where the mask (bool, `[N]`, on the CPU) is True, weighted as in
                the total loss; called with all rows, then with one slot's.
            slot_of_each_row: The true slot of each entry of the mask.
            slot: The slot to compare; None takes all that have rows.

        Raises:
            ProbeError: The gradients differ by more than the square root of the precision of their type, or
                nothing was measured.
        """
        self._require_attached("verify")
        truth = read_rows(slot_of_each_row, self._index, problems=None, row_ids=None, numbers={})
        if slot is not None and slot not in self._index:
            raise ProbeError(f"verify(): slot '{slot}' has no rows among those given.")
        chosen, processes = None if slot is None else self._index[slot], self._updates.find_processes
        with untouched(self.model), self._updates.aside():
            return compare_with_masked_loss(
                self.model, loss_of_rows, truth, chosen, self._collector, processes
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns attribution's momenta and where schedules stand, for a checkpoint; between updates.

        In data-parallel training every process has those of its own pieces of the parameters, and saves them.
        It holds tensors, numbers and names only, as `torch.load` takes them with `weights_only=True`.
        ProbeError where rows were announced since the last step.
        """
        self._require_attached("state_dict")
        return self._updates.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`; without one an optimizer's momentum counts as carried from before.

        Raises:
            ProbeError: It is of other slots, roles, settings or parameters, or of another process.
        """
        self._require_attached("load_state_dict")
        self._updates.load(state)

    def detach(self) -> None:
        """Removes every hook and frees the sums; the model is as before `attach`. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._undo_checkpointing()
        self._updates.clear()

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    @contextmanager
    def _detached_on_failure(self) -> Iterator[None]:
        try:
            yield
        except ProbeError:
            self.detach()
            raise

    def _require_attached(self, call: str) -> None:
        if not self.attached:
            raise ProbeError(f"{call}(): the scope is detached; call attach() again to measure.")
