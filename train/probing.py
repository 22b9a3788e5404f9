"""The probes of a training run: whatever fails in them is written down and never stops the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradscope import probes
from gradscope.errors import ProbeError
from gradscope.runfile.update import UpdateRecord
from gradscope.train.batch import Sample
from gradscope.train.config.sections import ProbesSection


class Probe:
    """Measures slot gradients while it can.

    Attributes:
        events: Kind and message of what happened and was not yet taken.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        roles: Mapping[str, str],
        policies: Mapping[str, str],
        *,
        section: ProbesSection,
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self._cross = section.cross
        self._own_seconds = 0.0
        self._before = 0.0
        self._scope: probes.Scope | None = None
        if not section.enabled:
            return
        attribution = probes.Attribution(
            enabled=section.attribution != "none", by="slot" if section.attribution == "slot" else "role"
        )
        try:
            self._scope = probes.attach(
                network,
                roles,
                policies,
                mode=section.mode,
                attribution=attribution,
                evidence=probes.Evidence(
                    modules_every=section.modules_every,
                    rows_every=section.rows_every,
                    top_rows=section.top_rows,
                    sketch_dim=section.sketch_dim,
                    sketch_seed=section.sketch_seed,
                    influence_every=section.influence_every,
                ),
            )
        except Exception as error:
            self._disable(error)

    @property
    def active(self) -> bool:
        """Whether gradients are being measured."""
        return self._scope is not None

    @contextmanager
    def rows(self, samples: Sequence[Sample], token_weights: Sequence[float]) -> Iterator[None]:
        """Says whose rows the forward pass inside the block holds.

        Args:
            samples: The rows of the pass, in order.
            token_weights: Weight of one token of each row in the loss of the update.
        """
        with ExitStack() as stack:
            if self._scope is not None:
                begin = time.perf_counter()
                lengths = [len(sample.row.completion_ids) for sample in samples]
                try:
                    stack.enter_context(
                        self._scope.rows(
                            [sample.row.slot for sample in samples],
                            problems=[sample.problem for sample in samples] if self._cross else None,
                            row_ids=[sample.row.id for sample in samples],
                            tokens=lengths,
                            advantages=[sample.advantage for sample in samples],
                            loss_weights=[
                                weight * n for weight, n in zip(token_weights, lengths, strict=True)
                            ],
                        )
                    )
                except Exception as error:
                    self._disable(error)
                self._own_seconds += time.perf_counter() - begin
            yield

    def step(self, optimizer: torch.optim.Optimizer) -> UpdateRecord | None:
        """Returns what the backward passes since the last call amount to; call it before clipping.

        What was applied fills in while the optimizer steps.
        """
        if self._scope is None:
            return None
        begin = time.perf_counter()
        try:
            record = self._scope.step(optimizer)
        except Exception as error:
            self._disable(error)
            return None
        self._own_seconds += time.perf_counter() - begin
        return record[0] if isinstance(record, list) else record

    def influence(self, logits_of: Callable[[str], torch.Tensor | None]) -> None:
        """Measures, if it is due, how far each contributor to the last step alone moves what slots say.

        Args:
            logits_of: Next-token logits of a slot's replies, `[..., V]`; None for a slot without any.
        """
        if self._scope is None or not self._scope.evidence.influence_due:
            return
        begin = time.perf_counter()
        try:
            self._scope.evidence.influence(logits_of)
        except Exception as error:
            self._disable(error)
        self._own_seconds += time.perf_counter() - begin

    def take_seconds(self) -> float:
        """Returns the wall time spent on probes since the last call, in backward passes and steps too."""
        now = self._own_seconds
        if self._scope is not None:
            now += self._scope.backward_seconds
        before, self._before = self._before, now
        return max(0.0, now - before)

    def state(self) -> dict[str, Any]:
        """Returns what probes need to go on from a checkpoint; empty without them."""
        return {} if self._scope is None else self._scope.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from a checkpoint's `state`; None where it has none that can be read."""
        if self._scope is None:
            return
        try:
            if state is None:
                raise ProbeError("the checkpoint has no state of the probes that can be read")
            self._scope.load_state_dict(state)
        except ProbeError as error:
            message = " ".join(str(error).split())[:300]
            self.events.append(("momenta_lost", f"Momentum from before counts as carried: {message}"))

    def take_events(self) -> list[tuple[str, str]]:
        """Returns the events since the last call."""
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        """Removes every hook from the model."""
        if self._scope is not None:
            self._scope.detach()
            self._scope = None

    def _disable(self, error: Exception) -> None:
        message = " ".join(str(error).split())[:500]
        self.events.append(("probe_disabled", f"{type(error).__name__}: {message}"))
        self.close()
