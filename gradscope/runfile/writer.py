"""RunWriter: the one way into a run file."""

from __future__ import annotations

import math
import operator
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gradscope.errors import RunFileError, SchemaError, unknown_name
from gradscope.runfile import provenance
from gradscope.runfile.intake import Intake, Row, number
from gradscope.runfile.layout import Layout
from gradscope.runfile.lock import WriterLock
from gradscope.runfile.log import RunLog, Trouble
from gradscope.runfile.mirror import MetricsMirror
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.resume import Start, fresh_start, resumed_start
from gradscope.runfile.update import UpdateRecord
from gradscope.schema import TABLES


class RunWriter:
    """Writes one run. Every append is in the journal, so safe from a crash, when it returns.

    A context manager. Data never makes it raise in the middle of a run: unknown names are kept under
    `/user`, labels that turn up late extend the file, what cannot be stored is left out, and a full disk
    makes records wait in memory; each of these warns once (UserWarning).

    Args:
        path: The run directory, made if absent (or a file name ending in `.h5`).
        slots: Slot to role, in the workflow's order.
        policies: Role or slot to policy; a slot's own entry goes first.
        config: The run's configuration, stored as JSON.
        seed: The run's seed.
        resume_from_step: Step of the checkpoint that training goes on from. Later rows of the run in `path`
            move to `/superseded`. None starts a new run.
        fsync: Whether each record is forced to the disk, which power failure needs and a crash does not.
        world_size: Number of training processes.
        hardware: What the run runs on; by default processor, cores and platform.

    Raises:
        RunFileError: A run is there and `resume_from_step` was not given, or the other way round; another
            writer is at work; or the run there cannot be read.
        SchemaError: A slot has no policy, or changed its role or policy since the run began.
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
        fsync: bool = False,
        world_size: int = 1,
        hardware: str | None = None,
    ) -> None:
        layout = Layout.of_slots(slots, policy_of_slots(slots, policies))
        self.paths = RunPaths.of(path)
        self.paths.directory.mkdir(parents=True, exist_ok=True)
        self._closed = False
        self._lock = WriterLock(self.paths.lock)
        try:
            attributes = provenance.root_attributes(config, seed, hardware)
            if resume_from_step is None:
                start = fresh_start(self.paths, layout, attributes)
            else:
                start = resumed_start(self.paths, layout, attributes, from_step=resume_from_step)
            self._intake = Intake(start.layout, policies)
            self._next = dict(start.next_numbers)
            self._segment = self._next["segments"]
            self._last_step = start.from_step
            self._coverage: dict[str, tuple[str, ...]] = {}
            self._log = RunLog(self.paths, start, fsync=fsync)
            self._mirror = MetricsMirror(self.paths.metrics, keep_to_step=resume_from_step)
        except BaseException:
            self._lock.release()
            raise
        self._open_segment(start, world_size)

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
        metrics = metrics or {}
        row: Row = {"step": step, "segment": self._segment, "wall_time": time.time()}
        if records:
            row["num_updates"] = len(records)
        rows = self._intake.step(row, records, metrics, next_update=self._next["updates"])
        self._last_step = step
        self._next["updates"] += len(records)
        self._log.put(rows, self._intake.layout)
        if not self._mirror.append(step, records, metrics):
            self._intake.notice("mirror", f"{self.paths.metrics}: no room; lines are missing there.")
        for each in records:
            self._note_coverage(step, each)
        self._settle(step)

    def append_evaluation(
        self,
        step: int,
        *,
        num_correct: float,
        num_total: float,
        dataset: str,
        temperature: float = math.nan,
        greedy: bool = False,
        role_accuracy: Mapping[str, float] | None = None,
        role_tokens_mean: Mapping[str, float] | None = None,
    ) -> None:
        """Logs one evaluation, taken after training step `step`.

        Args:
            step: Training step; evaluations may repeat a step and come in any order.
            num_correct: Right answers.
            num_total: Answers.
            dataset: Name of the evaluated problems.
            temperature: Sampling temperature.
            greedy: Whether the most likely token was always taken.
            role_accuracy: Role to the fraction of its own answers that are right.
            role_tokens_mean: Role to mean tokens of a reply.
        """
        step = self._checked(step)
        row: Row = {
            "step": step,
            "segment": self._segment,
            "dataset": dataset,
            "num_correct": number(num_correct),
            "num_total": number(num_total),
            "temperature": number(temperature),
            "greedy": int(greedy),
        }
        for name, values in (("role_accuracy", role_accuracy), ("role_tokens_mean", role_tokens_mean)):
            if values:
                self._intake.layout = self._intake.layout.with_labels("role", values)
                row[name] = values
        self._put("eval", [row])
        self._settle(step)

    def append_event(self, step: int, kind: str, message: str) -> None:
        """Logs that something happened at a step; `kind` is best one of `schema.EVENT_KINDS`."""
        step = self._checked(step)
        self._event(step, kind, message)
        self._settle(step)

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
            row_id: Ids that lead to the completions' texts.
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
        num = len(row_id)
        columns: dict[str, Sequence[Any] | None] = {
            "row_id": row_id, "row_slot": slot, "problem": problem, "episode": episode, "grad_norm": grad_norm,
            "advantage": advantage, "num_tokens": num_tokens,
            "update": [update] * num if isinstance(update, int) else update,
        }  # fmt: skip
        rows: list[Row] = [{"step": step} for _ in range(num)]
        for name, values in columns.items():
            if values is None:
                continue
            if len(values) != num:
                self._intake.notice(
                    f"rows {name}", f"'{name}' of rows has {len(values)} entries for {num} rows; left out."
                )
                continue
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        if sketch is not None:
            self._intake.add_sketches(rows, sketch)
        self._put("rows", rows)
        self._settle(step)

    def append_modules(
        self,
        step: int,
        *,
        slots: Sequence[str],
        modules: Sequence[str],
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
            change_gram: Inner products of the slots' weight changes, `[M, K, K]`.
            update: Running number of the update; by default the last one.
        """
        step = self._checked(step)
        place = {
            "module_update": self._next["modules"],
            "step": step,
            "update": self._next["updates"] - 1 if update is None else update,
        }
        given = {"grad_norm": grad_norm, "gram": gram, "change_gram": change_gram}
        arrays = {name: value for name, value in given.items() if value is not None}
        self._next["modules"] += 1
        rows = self._intake.module_rows(place, slots, modules, arrays)
        self._log.put(rows, self._intake.layout)
        self._settle(step)

    def compact(self, *, wait: bool = False) -> None:
        """Moves what is in the journals into `run.h5`, in a thread of its own.

        Args:
            wait: Whether to return only when it is done.
        """
        self._checked(0)
        if wait:
            self._log.finish_compaction()
        self._log.start_compaction()
        if wait:
            self._log.finish_compaction()
        self._settle(self._last_step or 0)

    def close(self) -> None:
        """Compacts a last time, marks the run as finished and gives it free. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self._log.close({"finished_at": provenance.now()})
            self._mirror.close()
        finally:
            self._lock.release()
        self._show(self._log.take_troubles())

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _checked(self, step: int) -> int:
        if self._closed:
            raise RunFileError(f"{self.paths.file}: this writer is closed. Append before close(), or resume.")
        return operator.index(step)

    def _open_segment(self, start: Start, world_size: int) -> None:
        resumed_from = -1 if start.from_step is None else start.from_step
        attributes = {name: start.attributes[name] for name in ("git_hash", "config_json")}
        row: Row = {
            "start_step": -1,
            "end_step": -1,
            "resumed_from_step": resumed_from,
            "world_size": world_size,
            "created_at": provenance.now(),
        }
        self._put("segments", [{**row, **attributes}])
        for kind, message in start.events:
            self._event(max(resumed_from, 0), kind, message)
        self._settle(max(resumed_from, 0))

    def _put(self, table: str, rows: list[Row]) -> None:
        """Gives rows their running numbers and writes them as one record."""
        dim = TABLES[table].dim
        numbered = [{**row, dim: self._next[table] + number} for number, row in enumerate(rows)]
        self._next[table] += len(rows)
        self._log.put(self._intake.batch({table: numbered}), self._intake.layout)

    def _event(self, step: int, kind: str, message: str) -> None:
        self._put("events", [{"step": step, "kind": kind, "message": message}])

    def _note_coverage(self, step: int, record: UpdateRecord) -> None:
        coverage = tuple(record.coverage)
        if coverage != self._coverage.get(record.policy, ()):
            self._coverage[record.policy] = coverage
            covered = f"does not cover {', '.join(coverage)}" if coverage else "covers all parameters"
            self._event(step, "coverage", f"The Gram of policy '{record.policy}' {covered}.")

    def _settle(self, step: int) -> None:
        """Compacts when due, then tells of what went wrong, in the log and as warnings."""
        self._log.compact_if_due()
        troubles = self._log.take_troubles()
        for kind, message in troubles:
            self._event(step, kind, message)
        self._show(troubles)

    def _show(self, troubles: Sequence[Trouble]) -> None:
        notices, self._intake.notices = self._intake.notices, []
        for message in (*(message for _, message in troubles), *notices):
            warnings.warn(message, UserWarning, stacklevel=4)


def policy_of_slots(slots: Mapping[str, str], policies: Mapping[str, str]) -> dict[str, str]:
    """Returns slot to policy from a map whose keys are roles or slots.

    Raises:
        SchemaError: A slot has no policy, or there are no slots.
        UnknownNameError: A key is neither slot nor role.
    """
    if not slots:
        raise SchemaError("slots: empty; expected slot to role, such as {'generator/0': 'generator'}.")
    allowed = list(dict.fromkeys([*slots.values(), *slots]))
    for key in policies:
        if key not in allowed:
            raise unknown_name("role or slot", key, allowed, where="policies")
    for slot, role in slots.items():
        if slot not in policies and role not in policies:
            raise SchemaError(
                f"policies: neither slot '{slot}' nor its role '{role}' has a policy, only "
                f"{', '.join(policies) or 'nothing'} has. Add '{role}': NAME."
            )
    return {slot: policies.get(slot, policies.get(role, "")) for slot, role in slots.items()}
