"""Numbers the rows of a run, writes them, and tells of what went wrong: in the log and as warnings."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.runfile import provenance
from gradscope.runfile.columns import Row, entries, number
from gradscope.runfile.durable import Fsync
from gradscope.runfile.intake import Intake
from gradscope.runfile.lock import WriterLock
from gradscope.runfile.log import RunLog
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.resume import Start
from gradscope.runfile.update import UpdateRecord
from gradscope.schema import TABLES


class Recorder:
    """Writes rows of all tables; each `put` is one journal record.

    Args:
        paths: Of the run.
        start: Where to begin.
        policies: Role or slot to policy.
        lock: The right to write the run.
        fsync: When journals are forced to the disk.
    """

    def __init__(
        self, paths: RunPaths, start: Start, policies: Mapping[str, str], lock: WriterLock, *, fsync: Fsync
    ) -> None:
        self._intake = Intake(start.layout, policies)
        self._next = dict(start.next_numbers)
        self._segment = start.segment
        self._coverage: dict[str, tuple[str, ...]] = {}
        self._attributed: dict[str, bool] = {}
        self._log = RunLog(paths, start, lock, fsync=fsync)
        if start.rows:
            self._log.put(start.rows, start.layout)

    def put_step(self, step: int, records: Sequence[UpdateRecord], metrics: Mapping[str, Any]) -> None:
        """Writes one training step with its updates."""
        row: Row = {"step": step, "segment": self._segment, "wall_time": time.time()}
        if records:
            row["num_updates"] = len(records)
        first = self._next["updates"]
        rows = self._intake.step(row, records, metrics, next_update=first)
        self._next["updates"] += len(records)
        self._log.put(rows, self._intake.layout)
        for update, record in enumerate(records, start=first):
            self._put_evidence(step, update, record)
            self._note_coverage(step, record)
            self._note_attribution(step, record)
            if record.pending:
                self.notice(
                    "pending",
                    f"step {step}: the record still waits for optimizer.step(), so that update_norm, "
                    "update_gram and effect are missing in the file; append it after that.",
                )

    def put_evaluation(self, step: int, row: Row, by_role: Mapping[str, Any]) -> None:
        """Writes one evaluation; `by_role` has its numbers by role."""
        roles = self._intake.role_columns(by_role)
        self._put("eval", [{**row, **roles, "step": step, "segment": self._segment}])

    def put_completions(
        self, step: int, row_id: Any, columns: Mapping[str, Any], *, update: Any, sketch: Any
    ) -> None:
        """Writes rows of `/rows`, as many as there are ids; `update` is one for all or one each."""
        ids = entries(row_id)
        if ids is None:
            self.notice("row_id", "'row_id' is no sequence of ids; the rows are left out.")
            return
        num = len(ids)
        updates = [update] * num if entries(update) is None and number(update) is not None else update
        own = {"row_id": ids, "step": [step] * num, "update": updates}
        rows = self._intake.completion_rows(num, {**columns, **own})
        if sketch is not None:
            self._intake.add_sketches(rows, sketch)
        self._put("rows", rows)

    def put_modules(
        self,
        step: int,
        slots: Sequence[str],
        modules: Sequence[str],
        contributors: Sequence[str],
        arrays: Mapping[str, Any],
        update: int | None,
    ) -> None:
        """Writes one row of `/modules`, of the last update unless another is named."""
        row: Row = {"step": step, "update": self._next["updates"] - 1 if update is None else update}
        given = {name: values for name, values in arrays.items() if values is not None}
        self._put("modules", [{**row, **self._intake.module_columns(slots, modules, contributors, given)}])

    def event(self, step: int, kind: str, message: str) -> None:
        """Writes one event."""
        self._put("events", [{"step": step, "kind": kind, "message": message}])

    def notice(self, key: str, sentence: str) -> None:
        """Warns with a sentence when the append is done, unless one of that key has been said before."""
        self._intake.notice(key, sentence)

    def compact(self, *, wait: bool) -> None:
        """Starts a compaction at a checkpoint; with `wait`, one of everything is done on return."""
        self._log.checkpoint()
        if wait:
            self._log.finish_compaction()
        self._log.start_compaction()
        if wait:
            self._log.finish_compaction()

    def settle(self, step: int) -> None:
        """Compacts when due, then tells of what went wrong."""
        self._log.compact_if_due()
        troubles = self._log.take_troubles()
        for trouble in troubles:
            self.event(step, trouble.kind, trouble.sentence)
        self._warn([trouble.full for trouble in troubles])

    def terminate(self, step: int) -> None:
        """Writes what waits and that the process was asked to stop; journals stay as they are."""
        self.event(step, "terminated", "SIGTERM ended the process.")
        self._log.checkpoint()

    def close(self, step: int, error: BaseException | None) -> None:
        """Compacts a last time and marks the run as finished, or as ended at a step by an exception."""
        if error is not None:
            self.event(step, "failed", f"{type(error).__name__}: {error}".rstrip(": "))
        self._log.close({} if error is not None else {"finished_at": provenance.now()})
        self._warn([trouble.full for trouble in self._log.take_troubles()])

    def _put(self, table: str, rows: list[Row]) -> None:
        """Gives rows their running numbers and writes them as one record."""
        dim = TABLES[table].dim
        numbered = [{**row, dim: self._next[table] + order} for order, row in enumerate(rows)]
        self._next[table] += len(rows)
        self._log.put(self._intake.batch({table: numbered}), self._intake.layout)

    def _put_evidence(self, step: int, update: int, record: UpdateRecord) -> None:
        """Writes what an update's record has of single modules and rows."""
        if (found := record.modules) is not None:
            arrays = {"grad_norm": found.grad_norm, "gram": found.gram, "change_gram": found.change_gram}
            self.put_modules(step, record.slots, found.modules, found.contributors, arrays, update)
        if (rows := record.rows) is not None:
            columns = {
                "row_slot": rows.slots,
                "problem": rows.problems,
                "episode": rows.episodes,
                "grad_norm": rows.grad_norm,
                "advantage": rows.advantages,
                "num_tokens": rows.num_tokens,
            }
            self.put_completions(step, rows.row_ids, columns, update=update, sketch=rows.sketch)

    def _note_coverage(self, step: int, record: UpdateRecord) -> None:
        coverage = tuple(record.coverage)
        if coverage != self._coverage.get(record.policy, ()):
            self._coverage[record.policy] = coverage
            covered = f"does not cover {', '.join(coverage)}" if coverage else "covers all parameters"
            self.event(step, "coverage", f"The Gram of policy '{record.policy}' {covered}.")

    def _note_attribution(self, step: int, record: UpdateRecord) -> None:
        attributed = record.attribution_reason is None
        if attributed != self._attributed.get(record.policy, True):
            self._attributed[record.policy] = attributed
            what = "attributed again" if attributed else f"not attributed: {record.attribution_reason}"
            self.event(step, "coverage", f"Applied changes of policy '{record.policy}' are {what}.")

    def _warn(self, messages: Sequence[str]) -> None:
        notices, self._intake.notices = self._intake.notices, []
        for message in (*messages, *notices):
            warnings.warn(message, UserWarning, stacklevel=5)
