"""What a run tells while it goes on and at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gradscope.train.evaluate import Evaluation


@dataclass(frozen=True)
class StepReport:
    """What `on_step` is told after every training step, and once before the first as step 0.

    A run that goes on tells first what is different from before, if anything is, as the step it goes on from.

    Attributes:
        step: Training step just finished.
        num_steps: Steps of the whole run.
        metrics: Numbers by the names of the run file's `/train`; empty before the first step.
        evaluations: Evaluations taken after this step.
        events: Kind and message of what happened.
        num_tokens: Reply tokens sampled in this step.
        checkpoint: Folder of the checkpoint written after this step.
    """

    step: int
    num_steps: int
    metrics: dict[str, object] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    num_tokens: int = 0
    checkpoint: Path | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        out: Run directory.
        step: Last training step.
        interrupted: Whether a signal ended it early; it can be resumed.
        evaluations: Evaluations of this process, in order.
        was_done: Whether the run had all its steps already, so that nothing was done or written.
    """

    out: Path
    step: int
    interrupted: bool
    evaluations: tuple[Evaluation, ...]
    was_done: bool = False
