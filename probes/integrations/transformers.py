"""Instruments `transformers.Trainer`: rows come from columns of its data set.

    trainer = instrument(trainer, slots={"solver/0": "solver", "judge/0": "judge"}, writer="runs/mine")
    trainer.train()

An update is measured at the end of the `training_step` that completes it, when `accelerator.sync_gradients`
says that the optimizer is about to step. That is the most robust place: all backward passes and a
data-parallel reduction are behind it, unscaling and clipping before it. The callback `on_pre_optimizer_step`
fires after clipping, and `accelerator.clip_grad_norm_` is not called by every path that clips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch.utils.data import IterableDataset

from gradscope.errors import ProbeError
from gradscope.probes.attribution import Attribution
from gradscope.probes.evidence import Evidence
from gradscope.probes.integrations.accelerate import check_gradients
from gradscope.probes.integrations.callback import StepWriter
from gradscope.probes.integrations.examples import Column, RowSource
from gradscope.probes.integrations.processes import joined
from gradscope.probes.integrations.session import Plan, Session, Training
from gradscope.probes.integrations.settings import run_settings
from gradscope.probes.targets import Mode
from gradscope.runfile import RunWriter

KEY = "gradscope_rows"
"""Key under which a batch carries its rows from the collator to the training step."""
Target = TypeVar("Target")


def instrument(
    trainer: Target,
    *,
    slots: Mapping[str, str],
    slot_of: Column = "slot",
    writer: RunWriter | str | Path,
    problem_of: Column | None = None,
    row_id_of: Column | None = None,
    policies: Mapping[str, str] | None = None,
    mode: Mode = "auto",
    attribution: Attribution | None = None,
    evidence: Evidence | None = None,
    accuracy: str = "accuracy",
) -> Target:
    """Returns the trainer with its class's training measured, or a class whose trainers are.

    The run file gets one step for each optimizer step: the update's record, the loss and whatever the trainer
    logs at that step, and an evaluation for each one that reports the metric named by `accuracy`.

    Args:
        trainer: A `transformers.Trainer`, changed in place, or a subclass of it.
        slots: Slot -> role, in the order of every result.
        slot_of: Column of the training set with the slot of a row, or a function of the example.
        writer: A run directory, opened for each `train()` and resumed with it, or an open RunWriter.
        problem_of: Column or function that gives the problem of a row.
        row_id_of: Column or function that gives the name of a row.
        policies: Role or slot -> policy; None sends all to the active adapter.
        mode: As for `probes.attach`.
        attribution: As for `probes.attach`.
        evidence: As for `probes.attach`.
        accuracy: Evaluation metric that is a fraction of right answers.

    Raises:
        ProbeError: No trainer, one that is instrumented already or trains in a way that hides gradients, a
            column that is missing, or an unknown slot in it.
    """
    source = RowSource(slots=slots, slot_of=slot_of, problem_of=problem_of, row_id_of=row_id_of)
    plan = Plan(
        slots=slots,
        policies=policies,
        mode=mode,
        attribution=attribution,
        evidence=evidence,
        writer=writer,
    )
    return probed(trainer, MeasuredTrainer, source, plan, base=transformers.Trainer, accuracy=accuracy)


def probed(
    trainer: Any,
    mixin: type[MeasuredTrainer],
    source: RowSource,
    plan: Plan,
    *,
    base: type,
    accuracy: str,
) -> Any:
    """Puts a mixin before the class of a trainer.

    Raises:
        ProbeError: As `instrument`.
    """
    cls = trainer if isinstance(trainer, type) else type(trainer)
    if not issubclass(cls, base):
        raise ProbeError(
            f"instrument(): got {cls.__name__}, which is no {base.__module__.split('.')[0]}.{base.__name__}."
        )
    if issubclass(cls, MeasuredTrainer):
        raise ProbeError(f"instrument(): {cls.__name__} is instrumented already.")
    settings = {"gradscope_source": source, "gradscope_plan": plan, "gradscope_accuracy": accuracy}
    measured = type(cls.__name__, (mixin, cls), {**settings, "__module__": cls.__module__})
    if isinstance(trainer, type):
        return measured
    trainer.__class__ = measured
    try:
        trainer.gradscope_setup()
    except ProbeError:
        trainer.__class__ = cls
        raise
    return trainer


@dataclass
class RowCollator:
    """Takes the rows of examples before the trainer's own collator sees them.

    Attributes:
        collate: The trainer's collator.
        source: Says what an example tells about its row.
        columns: The columns that the collator is to see; None for all.
    """

    collate: Callable[[list[Any]], Any]
    source: RowSource
    columns: frozenset[str] | None

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Any:
        """Returns the batch with its rows and their tokens under `KEY`."""
        rows = self.source.read(examples)
        own = (self.source.slot_of, self.source.problem_of, self.source.row_id_of)
        hidden = {column for column in own if isinstance(column, str)} - (self.columns or frozenset())
        seen = [
            {
                name: value
                for name, value in example.items()
                if name not in hidden and (self.columns is None or name in self.columns)
            }
            for example in examples
        ]
        batch = self.collate(seen)
        batch[KEY] = (rows, _scored_tokens(batch.get("labels")))
        return batch


def _scored_tokens(labels: Any) -> list[int] | None:
    """Returns the labels of each row that a causal model is scored on; None where they are no sequences."""
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return None
    counts: list[int] = labels[:, 1:].ne(-100).sum(1).tolist()
    return counts


class MeasuredTrainer(transformers.Trainer):
    """Stands before the class of a trainer; what it adds is named `gradscope_...`."""

    gradscope_source: RowSource
    gradscope_plan: Plan
    gradscope_accuracy: str
    gradscope_session: Session
    gradscope_loss: torch.Tensor | None
    gradscope_evaluated: dict[str, int]
    gradscope_checkpoint: str | None = None
    data_collator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradscope_setup()

    def gradscope_setup(self) -> None:
        """Checks the trainer and its data.

        Raises:
            ProbeError: As `instrument`.
        """
        check_gradients(self.accelerator)
        if self.args.n_gpu > 1:
            raise ProbeError(
                "instrument(): nn.DataParallel splits a batch behind the loop's back; start one process for "
                "each GPU (torchrun, accelerate launch) or show it one GPU (CUDA_VISIBLE_DEVICES)."
            )
        if self.args.use_liger_kernel or getattr(self.args, "use_liger_loss", False):
            raise ProbeError(
                "instrument(): Liger's fused kernels bypass the layers that gradients are read at; set "
                "use_liger_kernel=False (and use_liger_loss=False where TRL has it)."
            )
        columns = getattr(self.train_dataset, "column_names", None)
        if columns is not None:
            source = self.gradscope_source
            source.check_columns(columns)
            if isinstance(source.slot_of, str) and hasattr(self.train_dataset, "unique"):
                for name in self.train_dataset.unique(source.slot_of):
                    source.slot_named(name)
        self.gradscope_session = Session(self.gradscope_plan)
        self.gradscope_loss = None
        self.gradscope_evaluated = {}

    def get_train_dataloader(self) -> Any:
        """Returns the trainer's own loader, whose batches carry their rows."""
        if isinstance(self.train_dataset, IterableDataset) and (
            self.args.accelerator_config.dispatch_batches is not False
        ):
            raise ProbeError(
                "instrument(): an iterable data set needs accelerator_config={'dispatch_batches': False}; "
                "names of rows cannot be sent from process to process."
            )
        collate, removes = self.data_collator, self.args.remove_unused_columns
        columns = None
        if removes:
            self._set_signature_columns_if_needed()
            columns = frozenset(self._signature_columns)
        self.data_collator = RowCollator(collate, self.gradscope_source, columns)
        self.args.remove_unused_columns = False
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator, self.args.remove_unused_columns = collate, removes

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, measured."""
        callback = StepWriter(self)
        self.add_callback(callback)
        try:
            result = super().train(*args, **kwargs)
        except BaseException as error:
            self.gradscope_session.end(error)
            raise
        finally:
            self.remove_callback(callback)
        self.gradscope_session.end()
        self.gradscope_checkpoint = None
        return result

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.gradscope_checkpoint = checkpoint  # the scope's state lies beside the optimizer's

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs one micro-batch; measures the update that it completes."""
        session = self.gradscope_session
        if not session.began:
            session.begin(self.model, self._gradscope_training())
            session.resume(self.gradscope_checkpoint)
        loss = self.gradscope_micro_batch(model, inputs, *args, **kwargs)
        self.gradscope_loss = loss if self.gradscope_loss is None else self.gradscope_loss + loss
        if self.accelerator.sync_gradients:
            scaler = self.accelerator.scaler
            session.measure(self.optimizer, step=self.state.global_step + 1, scaler=scaler)
        return loss

    def gradscope_micro_batch(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the trainer's own step on rows that came with the batch."""
        rows, tokens = inputs.pop(KEY)
        with self.gradscope_session.rows(rows, tokens=tokens):
            return self.gradscope_own_step(model, inputs, *args, **kwargs)

    def gradscope_own_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the trainer's own `training_step`."""
        return super().training_step(*args, **kwargs)

    def gradscope_metrics(self) -> dict[str, Any]:
        """Returns what is known of the step that has just been taken, and forgets it."""
        loss, self.gradscope_loss = self.gradscope_loss, None
        if loss is None:
            return {}
        losses = joined([float(loss)])
        return {"loss": sum(losses) / len(losses)}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates, and remembers on how many rows."""
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        self.gradscope_evaluated[prefix] = output.num_samples
        return output

    def _gradscope_training(self) -> Training:
        return Training(
            step=self.state.global_step,
            seed=self.args.seed,
            config=run_settings(self),
            world_size=self.args.world_size,
            writes=self.is_world_process_zero(),
        )
