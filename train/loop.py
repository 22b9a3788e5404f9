"""The training loop: plays, updates, measures, evaluates, writes everything down, and can go on later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter
from gradscope.runfile.paths import RunPaths
from gradscope.train.checkpoint import State, checkpoint_steps, load_measured, save_checkpoint
from gradscope.train.config import Config
from gradscope.train.directory import check_out, config_change, default_out, write_description
from gradscope.train.environment import describe_environment
from gradscope.train.evaluate import Evaluation, evaluate_session
from gradscope.train.interrupt import Interrupt
from gradscope.train.record import EpisodeRecorder, name_rows
from gradscope.train.report import RunResult, StepReport
from gradscope.train.resume import Before, load_last_whole, put_aside, read_before
from gradscope.train.session import Session, StepResult
from gradscope.train.threads import cpu_threads
from gradscope.train.tracking.mirrors import Mirrors, check_installed


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
        resume: Whether to go on from the last whole checkpoint of a run, if one is there.
        on_step: Called after every step.

    Raises:
        ConfigError: The model or the data cannot be used, or a run would go on as another one.
        RunFileError: A run is there and `resume` is not set; it cannot go on; or what it wrote is lost.
    """
    folder = Path(out) if out is not None else default_out(config)
    exists = check_out(folder, resume=resume)
    before = read_before(folder, config) if exists else None
    check_installed(config.tracking)
    with cpu_threads(config.train.threads):
        session = Session(config)
        try:
            return _Run(session, folder, before=before, on_step=on_step or (lambda report: None)).go()
        finally:
            session.close()


class _Run:
    """One process's part of a run: from its first step or a checkpoint to the end or a signal."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        *,
        before: Before | None,
        on_step: Callable[[StepReport], object],
    ) -> None:
        self.session = session
        self.config = session.config
        self.folder = folder
        self.before = before
        self.on_step = on_step
        self.evaluations: list[Evaluation] = []
        self.state = State(0, session.policies.names)
        self.damaged: list[str] = []
        self.saved_step = -1
        if checkpoint_steps(folder):
            self.state, self.damaged = load_last_whole(folder, session.policies)
            self.saved_step = self.state.step
            if self.saved_step > 0:
                session.probe.load(load_measured(folder, self.saved_step))
        self.change = config_change(folder, self.config) if before else ""
        self.lost = ""
        self.environment = describe_environment(session.updater.device)
        self.recorder = EpisodeRecorder(folder, session.chat, self.config.run)

    def go(self) -> RunResult:
        """Trains to the end or to a signal.

        Raises:
            RunFileError: The run file went away, or the last weights cannot be saved.
        """
        if self.saved_step >= self.config.train.steps:
            return RunResult(self.folder, self.state.step, False, (), was_done=True)
        put_aside(self.folder, self.damaged)
        # Signals are ours before the writer, which takes care of SIGTERM where nobody else does.
        with (
            Interrupt() as interrupt,
            self._open_writer() as writer,
            self._open_mirrors(writer) as self.mirrors,
        ):
            self.state = replace(self.state, tracker_ids=self.mirrors.run_ids)
            write_description(self.folder, self.config, self.environment)
            if self.before:
                self._go_on(writer)
            if self.state.step == 0:
                self._begin(writer)
            last = self.config.train.steps
            while self.state.step < last and not interrupt.requested:
                self._one_step(self.state.step + 1, writer)
                self._check_run_file(writer)
            if self.saved_step != self.state.step:
                self._checkpoint([], writer)
        self._check_run_file(writer)
        self._check_weights()
        return RunResult(
            self.folder,
            self.state.step,
            bool(interrupt.requested) and self.state.step < last,
            tuple(self.evaluations),
        )

    def _open_writer(self) -> RunWriter:
        return RunWriter(
            self.folder,
            slots=self.session.workflow.slots,
            policies=self.session.routing,
            config=self.config.model_dump(mode="json"),
            seed=self.config.train.seed,
            resume_from_step=self.state.step if self.before else None,
            fsync=self.config.run.fsync,
            hardware=str(self.environment["hardware"]),
        )

    def _check_weights(self) -> None:
        """Refuses to end as if all were well.

        Raises:
            RunFileError: The last weights could not be saved.
        """
        if self.lost:
            raise RunFileError(
                f"{self.folder}: the weights after step {self.state.step} could not be saved ({self.lost}); "
                f"those of step {self.saved_step} are kept. Make room, then add --resume."
                if self.saved_step >= 0
                else f"{self.folder}: no weights could be saved ({self.lost}). Make room, use another folder."
            )

    def _open_mirrors(self, writer: RunWriter) -> Mirrors:
        return Mirrors(
            self.config.tracking,
            self.folder,
            slots=self.session.workflow.slots,
            policies=self.session.routing,
            config=self.config.model_dump(mode="json"),
            run_ids=self.state.tracker_ids,
            from_step=self.state.step if self.before else None,
            tell=writer.append_event,
        )

    def _check_run_file(self, writer: RunWriter) -> None:
        """Refuses to go on for nothing.

        Raises:
            RunFileError: What the run wrote is not there any more.
        """
        if not RunPaths.of(self.folder).exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                writer.close()  # its complaints would all be about the same loss
            raise RunFileError(
                f"{self.folder}: the run file went away while the run went on, at step "
                f"{self.state.step}; the numbers of all its steps are lost. "
                "Start again in a folder that nothing clears."
            )

    def _go_on(self, writer: RunWriter) -> None:
        """Writes down and tells what is not as before."""
        step = self.state.step
        self.recorder.forget_after(step)
        events = [("config_change", self.change)] if self.change else []
        if self.damaged:
            names = ", ".join(self.damaged)
            events.append(("checkpoint_damaged", f"{names} cannot be read; the run goes on from step {step}"))
        for kind, message in events:
            writer.append_event(step, kind, message)
        if events:
            self.on_step(StepReport(step, self.config.train.steps, events=tuple(events)))

    def _begin(self, writer: RunWriter) -> None:
        """Evaluates the untrained policies and keeps them, so that every run can be resumed."""
        section = self.config.evaluate
        events = self.session.probe.take_events()
        for kind, message in events:
            writer.append_event(0, kind, message)
        held = self.before is not None and self.before.evaluated_at_start
        evaluations = self._evaluate(0, writer) if section.every and section.at_start and not held else []
        checkpoint = None
        if evaluations or self.saved_step != 0:
            checkpoint = self._checkpoint(evaluations, writer, events)
        report = StepReport(0, self.config.train.steps, {}, tuple(evaluations), tuple(events), 0, checkpoint)
        self.on_step(report)

    def _one_step(self, step: int, writer: RunWriter) -> None:
        result = self.session.train_step(step)
        records = [update.record for update in result.updates]
        name_rows(records, result.episodes)
        writer.append(step, records, metrics=result.metrics)
        self.mirrors.step(step, records, result.metrics)
        self._record_episodes(result, writer)
        for kind, message in result.events:
            writer.append_event(step, kind, message)
        self.state = replace(self.state, step=step)
        evaluations = self._evaluate(step, writer) if self._is_due(step, self.config.evaluate.every) else []
        checkpoint = None
        is_last = step == self.config.train.steps
        if is_last or self._is_due(step, self.config.train.checkpoint_every) or self._is_best(evaluations):
            checkpoint = self._checkpoint(evaluations, writer, result.events)
        self.on_step(self._report(result, evaluations, checkpoint))

    def _record_episodes(self, result: StepResult, writer: RunWriter) -> None:
        try:
            measured = [update.record.rows for update in result.updates if update.record.rows is not None]
            self.recorder.record(
                result.step,
                result.episodes,
                result.samples,
                writer,
                measured=measured,
                num_top=self.config.probes.top_rows,
            )
        except OSError as error:
            result.events.append(("episodes_not_recorded", str(error)))

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def _evaluate(self, step: int, writer: RunWriter) -> list[Evaluation]:
        evaluations = evaluate_session(self.session, step=step)
        for evaluation in evaluations:
            row = evaluation.as_row(f"{self.config.task.name}/held_out")
            writer.append_evaluation(step, **row)
            self.mirrors.evaluation(step, row)
        self.evaluations += evaluations
        return evaluations

    def _is_best(self, evaluations: Sequence[Evaluation]) -> bool:
        """Returns whether an evaluation, the sampled one if that is on, beats all before."""
        return bool(evaluations) and evaluations[0].accuracy > self.state.best_accuracy

    def _checkpoint(
        self,
        evaluations: Sequence[Evaluation],
        writer: RunWriter,
        events: list[tuple[str, str]] | None = None,
    ) -> Path | None:
        """Saves a checkpoint; one that cannot be saved is written down, added to `events`, no more."""
        step, state = self.state.step, self.state
        if self._is_best(evaluations):
            state = replace(state, best_step=step, best_accuracy=evaluations[0].accuracy)
        try:
            path = save_checkpoint(
                self.folder,
                self.session.policies,
                state,
                keep=self.config.run.keep_checkpoints,
                measured=self.session.probe.state(),
            )
        except (OSError, RuntimeError, SafetensorError) as error:
            self.lost = " ".join(str(error).split())[:200]
            event = ("checkpoint_failed", f"the weights after step {step} could not be saved ({self.lost})")
            writer.append_event(step, *event)
            if events is not None:
                events.append(event)
            return None
        self.state, self.saved_step, self.lost = state, step, ""
        writer.append_event(step, "checkpoint", path.name)
        self.mirrors.flush(step)
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
