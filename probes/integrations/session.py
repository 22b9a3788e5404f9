"""One instrumented training: its scope, its run file, and the step that is being put together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.attaching import attach
from gradscope.probes.attribution import Attribution
from gradscope.probes.evidence import Evidence
from gradscope.probes.integrations.examples import Rows
from gradscope.probes.routing import route_slots
from gradscope.probes.scope import Scope
from gradscope.probes.targets import Mode
from gradscope.runfile import RunWriter
from gradscope.runfile.intake import KEPT_AS_USER
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.update import UpdateRecord

SAVED = "gradscope_scope_{rank}.pt"
"""File of a checkpoint with the state of one process's scope."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure in a training, and where to write it.

    Attributes:
        slots: Slot -> role.
        policies: Role or slot -> policy; None sends all to the active adapter.
        mode: As for `probes.attach`, like `attribution` and `evidence`.
        attribution: How applied changes are attributed.
        evidence: How often modules and single rows are looked at.
        writer: A run directory, opened for the training and resumed with it, or an open writer.
    """

    slots: Mapping[str, str]
    policies: Mapping[str, str] | None = None
    mode: Mode = "auto"
    attribution: Attribution | None = None
    evidence: Evidence | None = None
    writer: RunWriter | str | Path


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the run file says about a training.

    Attributes:
        step: The last step that was taken before; 0 at the start of a run.
        seed: Its seed.
        config: Its configuration.
        world_size: Number of processes.
        writes: Whether this process is the one that writes.
    """

    step: int = 0
    seed: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    writes: bool = True


class Session:
    """What the hooks of one training share.

    A measurement that fails is written down as an event `probe_disabled`, warned of once, and ends the
    measuring, never the training.

    Attributes:
        scope: Measures; None before `begin`, after `end` and once measuring has failed.
        began: Whether `begin` was called since the last `end`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scope: Scope | None = None
        self.began = False
        self._writer: RunWriter | None = None
        self._records: list[UpdateRecord] = []
        self._metrics: dict[str, Any] = {}
        self._step: int | None = None
        self._written: int | None = None

    def begin(self, model: nn.Module, training: Training) -> None:
        """Attaches to the model and opens the run file.

        Raises:
            ProbeError: As `probes.attach`.
            RunFileError: As `RunWriter`.
        """
        plan = self.plan
        routing = route_slots(model, plan.slots, plan.policies)
        scope = attach(
            model,
            plan.slots,
            plan.policies,
            mode=plan.mode,
            attribution=plan.attribution,
            evidence=plan.evidence,
        )
        try:
            if training.writes:
                self._writer = _writer(plan, routing, training)
        except BaseException:
            scope.detach()
            raise
        self.scope, self.began, self._written = scope, True, None

    @contextmanager
    def rows(
        self,
        rows: Rows,
        *,
        tokens: Sequence[float] | None = None,
        advantages: Sequence[float] | None = None,
        loss_weights: Sequence[float] | None = None,
        packed: bool | None = None,
    ) -> Iterator[None]:
        """Announces the rows of a micro-batch, as `Scope.rows` does; nothing once measuring has ended."""
        if self.scope is None:
            yield
            return
        with self.scope.rows(
            rows.slots,
            problems=rows.problems,
            row_ids=rows.row_ids,
            tokens=tokens,
            advantages=advantages,
            loss_weights=loss_weights,
            packed=packed,
        ):
            yield

    def measure(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        step: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Closes the update that `optimizer` is about to make in training step `step`.

        Args:
            optimizer: As the loop holds it.
            step: The training step.
            scaler: The loss scaler, where there is one.
        """
        if self.scope is None:
            return
        self._go_to(step)
        try:
            found = self.scope.step(optimizer, scaler)
        except Exception as error:  # a training goes on without its probe, whatever is wrong with that
            self.scope.detach()
            self.scope = None
            message = str(error) if isinstance(error, ProbeError) else repr(error)
            warnings.warn(f"gradscope stops measuring at step {step}: {message}", stacklevel=3)
            self.event(step, "probe_disabled", message)
            return
        self._records += found if isinstance(found, list) else [found]

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds numbers of a step, by the names of `RunWriter.append`; the step before it is written.

        What comes before `begin`, or of a step that is written already, is left out.
        """
        if self.began and step != self._written:
            self._go_to(step)
            self._metrics.update(metrics)

    def save(self, checkpoint: Path) -> None:
        """Writes the scope's state into a trainer's checkpoint, each process its own; nothing without one."""
        if self.scope is not None and checkpoint.is_dir():
            state = self.scope.state_dict()
            torch.save(state, checkpoint / SAVED.format(rank=state["rank"]))

    def resume(self, checkpoint: str | Path | None) -> None:
        """Goes on with the momenta of the roles in a checkpoint; called once after `begin`.

        Where the checkpoint has none, or those of another model or other slots, momentum counts as carried.
        """
        path = self._saved(checkpoint)
        if self.scope is None or path is None:
            return
        try:
            self.scope.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except ProbeError as error:
            warnings.warn(f"the momentum of {path.parent} counts as carried: {error}", stacklevel=3)

    def event(self, step: int, kind: str, message: str) -> None:
        """Writes an event."""
        if self._writer is not None:
            self._writer.append_event(step, kind, message)

    def evaluation(self, step: int, *, fraction: float, num_total: int, dataset: str) -> None:
        """Writes an evaluation, given by the fraction of right answers."""
        if self._writer is not None:
            self._writer.append_evaluation(
                step, num_correct=round(fraction * num_total), num_total=num_total, dataset=dataset
            )

    @staticmethod
    def _saved(checkpoint: str | Path | None) -> Path | None:
        if checkpoint is None:
            return None
        path = Path(checkpoint) / SAVED.format(rank=dist.get_rank() if dist.is_initialized() else 0)
        return path if path.exists() else None

    def flush(self) -> None:
        """Writes the step that was put together; its optimizer has filled in the attribution since."""
        step, records, metrics = self._step, self._records, self._metrics
        if step is None:
            return
        self._step, self._records, self._metrics, self._written = None, [], {}, step
        if self._writer is not None:
            with warnings.catch_warnings():
                # A trainer has names of its own, which are kept as they are.
                warnings.filterwarnings("ignore", message=f".*{KEPT_AS_USER}")
                self._writer.append(step, records, metrics=metrics)

    def _go_to(self, step: int) -> None:
        if step != self._step:
            self.flush()
            self._step = step

    def end(self, error: BaseException | None = None) -> None:
        """Writes what is left and takes every hook away; safe to call twice.

        Args:
            error: What ended the training early.
        """
        if self.scope is not None:
            self.scope.detach()
        self.scope, self.began = None, False
        writer = self._writer
        if writer is not None:
            self.flush()
            self._writer = None
            if writer is not self.plan.writer:
                writer.__exit__(type(error) if error else None, error, None)


def _writer(plan: Plan, routing: Mapping[str, str], training: Training) -> RunWriter:
    if isinstance(plan.writer, RunWriter):
        return plan.writer
    goes_on = training.step > 0 and RunPaths.of(plan.writer).exists()
    return RunWriter(
        plan.writer,
        slots=plan.slots,
        policies=routing,
        config=training.config,
        seed=training.seed,
        resume_from_step=training.step if goes_on else None,
        world_size=training.world_size,
    )
