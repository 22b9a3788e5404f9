"""The training loop: plays, updates, measures, evaluates, writes everything down, and can go on later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gradscope.runfile import RunWriter
from gradscope.train.checkpoint import State, find_checkpoint, load_checkpoint, save_checkpoint
from gradscope.train.config import Config
from gradscope.train.directory import check_out, config_change, default_out, write_description
from gradscope.train.environment import describe_environment
from gradscope.train.evaluate import Evaluation, evaluate_session
from gradscope.train.interrupt import Interrupt
from gradscope.train.record import EpisodeRecorder
from gradscope.train.session import Session, StepResult


@dataclass(frozen=True)
class StepReport:
    """What `on_step` is told after every training step, and once before the first as step 0.

    Attributes:
        step: Training step just finished.
        num_steps: Steps of the whole run.
        metrics: Numbers by the names of the run file's `/train`; empty at step 0.
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
    """

    out: Path
    step: int
    interrupted: bool
    evaluations: tuple[Evaluation, ...]


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: Callable[[StepReport], object] | None = None,
) -> RunResult:
    """Trains as configured and writes a run directory.

    Ctrl-C and SIGTERM let the step in progress finish, write a checkpoint and return.

    Args:
        config: Configuration, as `load_config` returns it.
        out: Run directory; that of `default_out` when not given.
        resume: Whether to go on from the last checkpoint of a run that is there; without one it starts over.
        on_step: Called after every step.

    Raises:
        ConfigError: The model or the data cannot be used.
        RunFileError: A run is there and `resume` is not set, or its checkpoint does not fit.
    """
    folder = Path(out) if out is not None else default_out(config)
    exists = check_out(folder, resume=resume)
    with cpu_threads(config.train.threads):
        session = Session(config)
        try:
            return _Run(session, folder, exists=exists, on_step=on_step or (lambda report: None)).go()
        finally:
            session.close()


class _Run:
    """One process's part of a run: from its first step or a checkpoint to the end or a signal."""

    def __init__(
        self, session: Session, folder: Path, *, exists: bool, on_step: Callable[[StepReport], object]
    ) -> None:
        self.session = session
        self.config = session.config
        self.folder = folder
        self.exists = exists
        self.on_step = on_step
        self.evaluations: list[Evaluation] = []
        self.state = State(0, session.policies.names)
        checkpoint = find_checkpoint(folder) if exists else None
        if checkpoint is not None:
            self.state = load_checkpoint(checkpoint, session.policies)
        self.change = config_change(folder, self.config) if exists else ""
        self.saved_step = self.state.step
        self.environment = describe_environment(session.updater.device)
        self.recorder = EpisodeRecorder(folder, session.chat, self.config.run)

    def go(self) -> RunResult:
        """Trains to the end or to a signal."""
        writer = RunWriter(
            self.folder,
            slots=self.session.workflow.slots,
            policies=self.session.routing,
            config=self.config.model_dump(mode="json"),
            seed=self.config.train.seed,
            resume_from_step=self.state.step if self.exists else None,
            hardware=str(self.environment["hardware"]),
        )
        with Interrupt() as interrupt, writer:
            write_description(self.folder, self.config, self.environment)
            if self.exists:
                self.recorder.forget_after(self.state.step)
            if self.change:
                writer.append_event(self.state.step, "config_change", self.change)
            if self.state.step == 0:
                self._begin(writer)
            last = self.config.train.steps
            while self.state.step < last and not interrupt.requested:
                self._one_step(self.state.step + 1, writer)
            if self.saved_step != self.state.step:
                self._checkpoint([], writer)
        return RunResult(
            self.folder,
            self.state.step,
            bool(interrupt.requested) and self.state.step < last,
            tuple(self.evaluations),
        )

    def _begin(self, writer: RunWriter) -> None:
        """Evaluates the untrained policies and keeps them, so that every run can be resumed."""
        section = self.config.evaluate
        events = self.session.probe.take_events()
        for kind, message in events:
            writer.append_event(0, kind, message)
        evaluations = self._evaluate(0, writer) if section.every and section.at_start else []
        checkpoint = self._checkpoint(evaluations, writer)
        report = StepReport(0, self.config.train.steps, {}, tuple(evaluations), tuple(events), 0, checkpoint)
        self.on_step(report)

    def _one_step(self, step: int, writer: RunWriter) -> None:
        result = self.session.train_step(step)
        records = [update.record for update in result.updates]
        writer.append(step, records, metrics=result.metrics)
        for kind, message in result.events:
            writer.append_event(step, kind, message)
        self.recorder.record(step, result.episodes, result.samples, writer)
        self.state = replace(self.state, step=step)
        evaluations = self._evaluate(step, writer) if self._is_due(step, self.config.evaluate.every) else []
        checkpoint = None
        is_last = step == self.config.train.steps
        if is_last or self._is_due(step, self.config.train.checkpoint_every) or self._is_best(evaluations):
            checkpoint = self._checkpoint(evaluations, writer)
        self.on_step(self._report(result, evaluations, checkpoint))

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def _evaluate(self, step: int, writer: RunWriter) -> list[Evaluation]:
        evaluations = evaluate_session(self.session, step=step)
        for evaluation in evaluations:
            writer.append_evaluation(
                step,
                num_correct=evaluation.num_correct,
                num_total=evaluation.num_total,
                dataset=f"{self.config.task.name}/held_out",
                temperature=evaluation.temperature,
                greedy=evaluation.greedy,
                role_accuracy=evaluation.role_accuracy,
                role_tokens_mean=evaluation.role_tokens_mean,
            )
        self.evaluations += evaluations
        return evaluations

    def _is_best(self, evaluations: Sequence[Evaluation]) -> bool:
        """Returns whether an evaluation, the sampled one if that is on, beats all before."""
        return bool(evaluations) and evaluations[0].accuracy > self.state.best_accuracy

    def _checkpoint(self, evaluations: Sequence[Evaluation], writer: RunWriter) -> Path:
        step = self.state.step
        if self._is_best(evaluations):
            self.state = replace(self.state, best_step=step, best_accuracy=evaluations[0].accuracy)
        path = save_checkpoint(
            self.folder, self.session.policies, self.state, keep=self.config.run.keep_checkpoints
        )
        self.saved_step = step
        writer.append_event(step, "checkpoint", path.name)
        writer.compact()
        return path

    def _report(
        self, result: StepResult, evaluations: Sequence[Evaluation], checkpoint: Path | None
    ) -> StepReport:
        num_tokens = sum(len(sample.row.completion_ids) for sample in result.samples)
        return StepReport(
            result.step,
            self.config.train.steps,
            result.metrics,
            tuple(evaluations),
            tuple(result.events),
            num_tokens,
            checkpoint,
        )


@contextmanager
def cpu_threads(num: int) -> Iterator[None]:
    """Uses that many CPU threads inside the block; 0 leaves torch's choice."""
    before = torch.get_num_threads()
    if num:
        torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
