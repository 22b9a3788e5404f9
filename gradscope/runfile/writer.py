"""RunWriter: the one way into a run file."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradscope.errors import RunFileError, SchemaError
from gradscope.runfile import provenance
from gradscope.runfile.columns import Row
from gradscope.runfile.durable import Fsync, checked_fsync
from gradscope.runfile.layout import Layout, policy_of_slots
from gradscope.runfile.lock import WriterLock
from gradscope.runfile.mirror import MetricsMirror
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.recorder import Recorder
from gradscope.runfile.resume import start
from gradscope.runfile.termination import Termination, uninterrupted
from gradscope.runfile.update import UpdateRecord

LARGEST_STEP = 2**53
"""Beyond it a float skips whole numbers."""


class RunWriter:
    """Writes one run. Every append is in the journal, so safe from a crash, when it returns.

    A context manager; left by an exception, the run is stored with an event `failed` and without
    `finished_at`. Data never makes it raise in the middle of a run: unknown names are kept under `/user`,
    labels that turn up late extend the file, what cannot be stored is left out, and a full or failing disk
    makes records wait in memory; each warns once (UserWarning). SIGTERM lets an append finish and leaves an
    event `terminated` before the process dies of it, unless the program handles the signal itself. Threads
    may share a writer. In a forked process its methods raise RunFileError, and closing does nothing.

    Args:
        path: The run directory, made if absent (or a file name ending in `.h5`).
        slots: Slot to role, in the workflow's order.
        policies: Role or slot to policy; a slot's own entry goes first.
        config: The run's configuration, stored as JSON.
        seed: The run's seed.
        resume_from_step: Step of the checkpoint that training goes on from. Later rows of the run in `path`
            move to `/superseded`. None starts a new run.
        fsync: When journals are forced to the disk, which a loss of power needs and a crash does not:
            `never`, `checkpoint` (whenever `compact` is called) or `record` (before each append returns).
        world_size: Number of training processes.
        hardware: What the run runs on; by default processor, cores and platform.

    Raises:
        RunFileError: A run is there and `resume_from_step` was not given, or the other way round; another
            writer is at work; or the run there cannot be read.
        SchemaError: A slot has no policy, or changed its role or policy since the run began; a name is no
            text that a file can hold; `fsync` is none.
        UnknownNameError: A key of `policies` is neither slot nor role.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        slots: Mapping[str, str],
        policies: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        resume_from_step: int | None = None,
        fsync: Fsync = "checkpoint",
        world_size: int = 1,
        hardware: str | None = None,
    ) -> None:
        layout = Layout.of_slots(slots, policy_of_slots(slots, policies))
        attributes = provenance.root_attributes(config, seed, hardware)
        policy = checked_fsync(fsync)
        self.paths = RunPaths.of(Path(path).absolute())  # the process may change its folder
        self._closed = False
        try:
            self.paths.directory.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self.paths.lock)
            try:
                place = (self.paths, layout, attributes)
                begin = start(*place, from_step=resume_from_step, world_size=world_size)
                self._last_step = begin.from_step
                self._mirror = MetricsMirror(self.paths.metrics, keep_to_step=resume_from_step)
                self._recorder = Recorder(self.paths, begin, policies, self._lock, fsync=policy)
                if self._mirror.num_foreign:
                    self._recorder.notice("foreign", self._mirror.foreign_notice)
                self._termination = Termination(self._terminate, str(self.paths.file))
            except BaseException:
                self._lock.release()
                raise
        except RunFileError:
            raise
        except OSError as error:
            raise RunFileError(
                f"{self.paths.directory}: a run cannot be written there ({error}). Choose another folder."
            ) from error

    @uninterrupted
    def append(
        self,
        step: int,
        record: UpdateRecord | Sequence[UpdateRecord] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Logs one training step.

        Args:
            step: Number of the step, above every earlier one.
            record: What was measured about the step's update; a sequence when it had several.
            metrics: Numbers by the names of `/train`: plain for the step (`loss`), a mapping by slot
                (`reward_mean`) or by phase (`seconds`). Numbers of `/updates`, plain or by policy, go to
                the step's records.

        Raises:
            SchemaError: The step does not increase. (A ValueError.)
            RunFileError: The writer is closed.
        """
        step = self._checked(step)
        if self._last_step is not None and step <= self._last_step:
            raise SchemaError(
                f"{self.paths.file}: step {step} follows step {self._last_step}; steps must increase. "
                "To go back to a checkpoint, open the run again with resume_from_step."
            )
        records = [record] if isinstance(record, UpdateRecord) else list(record or ())
        self._last_step, metrics = step, metrics or {}
        self._recorder.put_step(step, records, metrics)
        if not self._mirror.append(step, records, metrics):
            self._recorder.notice(
                "mirror", f"{self.paths.metrics}: cannot be written; lines are missing there."
            )
        self._recorder.settle(step)

    @uninterrupted
    def append_evaluation(
        self,
        step: int,
        *,
        num_correct: float,
        num_total: float,
        dataset: str,
        temperature: float = math.nan,
        greedy: bool | None = False,
        role_accuracy: Mapping[str, float] | None = None,
        role_tokens_mean: Mapping[str, float] | None = None,
    ) -> None:
        """Logs one evaluation.

        Args:
            step: Training step after which it was taken; they may repeat a step and come in any order.
            num_correct: Right answers, of `num_total`.
            num_total: Answers.
            dataset: Name of the evaluated problems.
            temperature: Sampling temperature.
            greedy: Whether the most likely token was always taken; None where that is not known.
            role_accuracy: Role to the fraction of its own answers that are right.
            role_tokens_mean: Role to mean tokens of a reply.
        """
        step = self._checked(step)
        row: Row = {
            "dataset": dataset, "num_correct": num_correct, "num_total": num_total,
            "temperature": temperature, "greedy": greedy,
        }  # fmt: skip
        roles = {"role_accuracy": role_accuracy, "role_tokens_mean": role_tokens_mean}
        self._recorder.put_evaluation(
            step, row, {name: own for name, own in roles.items() if own is not None}
        )
        self._recorder.settle(step)

    @uninterrupted
    def append_event(self, step: int, kind: str, message: str) -> None:
        """Logs that something happened at a step.

        Args:
            step: Training step.
            kind: One of `schema.EVENT_KINDS`, which readers know; a kind of one's own is kept as it is.
            message: One sentence.
        """
        step = self._checked(step)
        self._recorder.event(step, kind, message)
        self._recorder.settle(step)

    @uninterrupted
    def append_rows(
        self,
        step: int,
        *,
        row_id: Sequence[str],
        slot: Sequence[str] | None = None,
        problem: Sequence[str] | None = None,
        episode: Sequence[str] | None = None,
        grad_norm: Sequence[float] | None = None,
        advantage: Sequence[float] | None = None,
        num_tokens: Sequence[float] | None = None,
        update: Sequence[int] | int | None = None,
        sketch: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Logs completions one by one, all sequences `[n]` long.

        Args:
            step: Training step.
            row_id: Ids that lead to the texts.
            slot: Slots that wrote them.
            problem: Ids of the problems.
            episode: Ids of the episodes.
            grad_norm: Norms of the rows' gradients.
            advantage: Advantages.
            num_tokens: Reply tokens.
            update: Running number of the update, one for all or one each.
            sketch: Projections of the rows' gradients, `[n, S]`.
        """
        step = self._checked(step)
        columns = {
            "row_slot": slot, "problem": problem, "episode": episode,
            "grad_norm": grad_norm, "advantage": advantage, "num_tokens": num_tokens,
        }  # fmt: skip
        self._recorder.put_completions(step, row_id, columns, update=update, sketch=sketch)
        self._recorder.settle(step)

    @uninterrupted
    def append_modules(
        self,
        step: int,
        *,
        slots: Sequence[str],
        modules: Sequence[str],
        contributors: Sequence[str] = (),
        grad_norm: Any = None,
        gram: Any = None,
        change_gram: Any = None,
        update: int | None = None,
    ) -> None:
        """Logs one update module by module.

        Args:
            step: Training step.
            slots: K slot names.
            modules: M module names.
            grad_norm: Norms of the slots' gradients, `[K, M]`.
            gram: Inner products of the slots' gradients, `[M, K, K]`.
            contributors: C names of contributors.
            change_gram: Inner products of the weight changes that these made, `[M, C, C]`.
            update: Running number of the update; by default the last one.
        """
        step = self._checked(step)
        arrays = {"grad_norm": grad_norm, "gram": gram, "change_gram": change_gram}
        self._recorder.put_modules(step, slots, modules, contributors, arrays, update)
        self._recorder.settle(step)

    @uninterrupted
    def compact(self, *, wait: bool = False) -> None:
        """Moves what is in the journals into `run.h5`, in the background; to be called at checkpoints.

        Unless `fsync` is `never`, all that was appended before is on the disk when it returns.

        Args:
            wait: Whether to return only when it is done.
        """
        self._checked(0)
        self._recorder.compact(wait=wait)
        self._recorder.settle(self._last_step or 0)

    def close(self) -> None:
        """Compacts a last time, marks the run as finished and gives it free; a second call does nothing."""
        self._end(None)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._end(failure[1])

    def _terminate(self) -> None:  # quickly: the process is about to be killed
        self._recorder.terminate(max(self._last_step or 0, 0))
        self._lock.release()

    def _end(self, error: BaseException | None) -> None:
        if not self._termination.is_own:
            return  # the run is the parent's
        with self._termination:
            if self._closed:
                return
            self._closed = True
            self._termination.release()
            try:
                self._mirror.close()
                self._recorder.close(max(self._last_step or 0, 0), error)
            finally:
                self._lock.release()

    def _checked(self, step: int) -> int:
        if self._closed:
            raise RunFileError(f"{self.paths.file}: this writer is closed. Append before close(), or resume.")
        number = operator.index(step)
        if abs(number) > LARGEST_STEP:
            raise SchemaError(f"{self.paths.file}: step {number} is beyond {LARGEST_STEP}. Count from 0.")
        return number
