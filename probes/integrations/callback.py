"""Writes the steps of an instrumented trainer when it tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from gradscope.probes.integrations.names import step_metrics

if TYPE_CHECKING:
    from gradscope.probes.integrations.transformers import MeasuredTrainer


class StepWriter(transformers.TrainerCallback):
    """Puts a step together from `on_step_end`, `on_log` and `on_evaluate`.

    A step is written when the next begins, before a checkpoint is and at the end, since the trainer logs it
    after it has ended.
    """

    def __init__(self, trainer: MeasuredTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes what the step's own passes gave."""
        self.trainer.gradscope_session.note(state.global_step, self.trainer.gradscope_metrics())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds what the trainer logs of the step."""
        if logs and "train_runtime" not in logs:
            self.trainer.gradscope_session.note(state.global_step, step_metrics(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Writes an evaluation for each set that reports the accuracy."""
        for prefix, num_total in self.trainer.gradscope_evaluated.items():
            fraction = _accuracy(metrics or {}, prefix, self.trainer.gradscope_accuracy)
            if fraction is not None:
                self.trainer.gradscope_session.evaluation(
                    state.global_step, fraction=fraction, num_total=num_total, dataset=prefix
                )
        self.trainer.gradscope_evaluated.clear()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the step, behind which a resumed training starts, and puts the scope's state beside it."""
        self.trainer.gradscope_session.flush()
        if not args.save_only_model:  # the optimizer's state is not saved either
            self.trainer.gradscope_session.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _accuracy(metrics: Mapping[str, Any], prefix: str, name: str) -> float | None:
    value = metrics.get(f"{prefix}_{name}")
    return None if value is None else float(value)
