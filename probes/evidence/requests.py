"""Evidence that a loop asks for itself, since it takes passes through the model that only the loop can make.

Legend: S slots, C = R + 2 contributors: roles, decay, carried.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.evidence.components import check_losses, hides_parameters
from gradscope.probes.evidence.influence import LogitsOfSlot, influence
from gradscope.probes.evidence.settings import is_due
from gradscope.probes.targets import Layout
from gradscope.probes.updates import Updates
from gradscope.schema import EXTRA_CONTRIBUTORS


class Requests:
    """What a scope measures when it is asked to; `scope.evidence`.

    Args:
        model: The probed model.
        layout: What is measured.
        slots: Slot -> role.
        updates: The updates in progress.
    """

    def __init__(self, model: nn.Module, layout: Layout, slots: Mapping[str, str], updates: Updates) -> None:
        self._model = model
        self._layout = layout
        self._slots = dict(slots)
        self._updates = updates

    @property
    def influence_due(self) -> tuple[str, ...]:
        """Policies of whose last step `influence` can tell; empty between scheduled updates."""
        return tuple(name for name, own in self._updates.gathering.policies.items() if own.step is not None)

    def components(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Measures the gradients of the parts of a micro-batch's loss (policy, KL, entropy) by slot.

        Call it between the forward pass and `backward()` of the whole loss. Each part costs a backward pass
        of its own, in updates that `Evidence.components_every` names; in others nothing happens. Gradients
        and what is measured of the whole loss stay as they are. The record's `components` has the products.

        Args:
            losses: Name -> part of the loss with its coefficient, but without any loss scale; the same
                names for all micro-batches.

        Raises:
            ProbeError: A part is no single number, the parts are others than before in this update, they
                cannot be measured, or training is spread over processes.
        """
        policies, collector = self._updates.gathering.policies, self._updates.collector
        self._require_one_process("components")
        check_losses(losses, next((tuple(own.components) for own in policies.values() if own.components), ()))
        every, main = self._updates.gathering.settings.components_every, collector.sums
        due = [name for name, own in policies.items() if is_due(every, own.num_updates)]
        if not due:
            return
        with self._updates.aside():
            fresh = collector.sums
            for name, loss in losses.items():
                collector.sums = fresh | {policy: self._sums(policy, name, main[policy]) for policy in due}
                self._differentiate(name, loss)
            collector.settle()
            failure = collector.failure
        if failure is not None:
            raise ProbeError(f"components(): {failure}")

    def influence(self, logits_of: LogitsOfSlot) -> None:
        """Measures how far each contributor's change alone moves what slots say, KL in nats a position.

        Call it after `optimizer.step()`: where `influence_due` names policies, it fills `influence` of their
        records, slots x contributors, NaN across policies; elsewhere nothing happens. It costs one forward
        pass a slot and contributor, and one a slot. Parameters and random numbers are as before when it
        returns or raises.

        Args:
            logits_of: Next-token logits of a slot at its positions, `[..., V]`, by the model as it is when
                called; None for a slot without any. It should take the slot's own policy (`set_adapter`).

        Raises:
            ProbeError: The logits have another shape, or change it.
        """
        names, roles = tuple(self._slots), tuple(dict.fromkeys(self._slots.values()))
        for policy, own in self._updates.gathering.policies.items():
            if own.step is None:
                continue
            (record, applied), own.step = own.step, None
            slots = [names[slot] for slot in self._layout.policies[policy].slots]
            columns = [(*roles, *EXTRA_CONTRIBUTORS).index(name) for name in applied.contributors]
            record.influence = np.full((len(names), len(roles) + len(EXTRA_CONTRIBUTORS)), np.nan)
            for slot, values in influence(self._model, applied, slots, logits_of).items():
                record.influence[names.index(slot), columns] = values

    def _sums(self, policy: str, component: str, main: SlotAccumulators) -> SlotAccumulators:
        """Returns the sums of a part of the loss, divided into the same cells as those of the whole."""
        components = self._updates.gathering.policies[policy].components
        if component not in components:
            components[component] = self._updates.fresh_sums()[policy]
        if main.cells.num_halves == 2:
            components[component].halve()
        return components[component]

    def _differentiate(self, name: str, loss: torch.Tensor) -> None:
        """Runs a backward pass that reaches the taps and leaves `.grad` alone."""
        parameters = [
            parameter
            for policy in self._layout.policies.values()
            for parameter in (*policy.covered.values(), *policy.uncovered.values())
            if parameter.requires_grad
        ]
        if loss.grad_fn is None:
            return
        if hides_parameters(loss.grad_fn):
            raise ProbeError(
                f"components(): the graph of '{name}' holds reentrant activation checkpointing, which "
                "only the backward of a whole loss can pass; set use_reentrant=False."
            )
        try:
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ProbeError(
                f"components(): the backward pass of '{name}' failed: {error} Call it before backward() of "
                "the whole loss."
            ) from error

    def _require_one_process(self, call: str) -> None:
        if not self._updates.collector.sums:
            raise ProbeError(f"{call}(): the scope is detached; call attach() again to measure.")
        if self._updates.processes.several:
            raise ProbeError(f"{call}(): not available in training that is spread over processes.")
