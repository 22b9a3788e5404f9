"""The log under a writer: numbered journal records, compaction in a thread, and what went wrong with them."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from gradscope.errors import RunFileError
from gradscope.runfile import batch, compaction, frames
from gradscope.runfile.batch import Batch
from gradscope.runfile.compaction import Task
from gradscope.runfile.compaction_child import WORTH_A_CHILD, ChildError, build_in_child
from gradscope.runfile.damage import lost_records, num_records
from gradscope.runfile.durable import Fsync
from gradscope.runfile.journal import NO_ROOM, JournalWriter
from gradscope.runfile.layout import Layout
from gradscope.runfile.lock import WriterLock
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.resume import Start
from gradscope.schema import describe_tables

_COMPACT_AT_LEAST = 64
_COMPACT_FRACTION = 0.25
"""Of what is stored. A compaction takes a process its start, about 0.2 s, whatever there is to do."""
_MOST_WAITING = 256 * 2**20
_FINAL_SPREAD = 1.03


class Trouble(NamedTuple):
    """Something that went wrong: kind of event, one line for the log, and what else a warning says."""

    kind: str
    sentence: str
    details: str = ""

    @property
    def full(self) -> str:
        """The sentence with the details under it."""
        return f"{self.sentence}\n{self.details}" if self.details else self.sentence


class RunLog:
    """Appends batches of rows, and folds them into the run file once there are enough.

    Args:
        paths: Of the run.
        start: Where to begin.
        lock: The right to write the run.
        fsync: When journals are forced to the disk.
    """

    def __init__(self, paths: RunPaths, start: Start, lock: WriterLock, *, fsync: Fsync) -> None:
        self._paths = paths
        self._lock = lock
        self._fsync = fsync
        self._run = frames.run_tag(start.attributes["run_id"])
        self._attributes = dict(start.attributes)
        self._layout = start.layout
        self._sequence = start.sequence
        self._num_stored, self._num_pending = start.num_steps, 0
        self._troubles: list[Trouble] = []
        self._is_waiting = False
        self._num_dropped = 0
        self._compaction_failed = False
        self._sync_failed = False
        self._running: Future[int] | None = None
        self._journal = JournalWriter(
            paths,
            start.journal_number,
            self._header(),
            lock.claim,
            sync_records=fsync == "record",
            most_waiting=_MOST_WAITING,
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradscope-compaction")

    def put(self, rows: Batch, layout: Layout) -> None:
        """Writes rows as one record, after a header where the layout is new."""
        if layout is not self._layout:
            self._layout = layout
            self._journal.append(self._header())
        self._sequence += 1
        payload = batch.encode(rows, layout)
        self._journal.append(frames.Frame(frames.ROWS_KIND, self._sequence, self._run, payload))
        self._num_pending += 1
        self._watch_queue()

    def compact_if_due(self) -> None:
        """Starts a compaction when the journal holds 64 records and a quarter of what is stored."""
        if self._running is not None and self._running.done():
            self.finish_compaction()
        if self._num_pending >= max(_COMPACT_AT_LEAST, _COMPACT_FRACTION * self._num_stored):
            self.start_compaction()

    def start_compaction(self) -> None:
        """Rotates the journal and folds the closed ones in the background; at most one at a time."""
        if self._running is not None and not self._running.done():
            return
        self.finish_compaction()
        if self._journal.trouble is not None:
            return  # what the journal is refused, a larger file is too
        try:
            self._journal.rotate(self._header())
        except OSError as error:
            self._note_failure(error)
            return
        self._num_stored, self._num_pending = self._num_stored + self._num_pending, 0
        task = Task(self._paths.file, self._journal.number, self._attributes)
        self._running = self._pool.submit(self._compact, task)

    def _compact(self, task: Task) -> int:
        """Folds journals in while training goes on; returns how many records are missing."""
        if task.num_bytes() < WORTH_A_CHILD:
            return compaction.compact(task, self._lock.claim)
        try:
            return compaction.compact(task, self._lock.claim, make=build_in_child)
        except ChildError as error:
            why = f"{self._paths.file}: no process of its own for compaction ({error}); done in this one."
            self._troubles.append(Trouble("compaction_failed", why))
            return compaction.compact(task, self._lock.claim)

    def checkpoint(self) -> None:
        """Makes what has been written survive a loss of power, if that is the policy."""
        if self._fsync == "never":
            return
        try:
            self._journal.sync()
        except OSError as error:
            if not self._sync_failed:
                why = f"{self._paths.directory}: fsync failed ({error}); a loss of power may cost records."
                self._troubles.append(Trouble("write_failed", why))
            self._sync_failed = True

    def finish_compaction(self) -> None:
        """Waits for a running compaction and takes note of how it went."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            self._note_missing(running.result())
        except Exception as error:  # whatever it is, the journals have the rows and training goes on
            self._note_failure(error)

    def close(self, attributes: Mapping[str, Any]) -> None:
        """Folds everything into the run file with these further root attributes; no journal remains.

        Where that fails the journals stay, from which the run is just as readable.
        """
        self.finish_compaction()
        self._pool.shutdown()
        self._journal.flush()
        if num := self._journal.num_waiting:
            why = f"{num_records(num)} never got onto the disk ({self._journal.trouble})."
            self._troubles.append(Trouble("dropped_records", why))
        self._journal.close()
        final = {**self._attributes, **attributes}
        try:
            task = Task(self._paths.file, self._journal.number + 1, final, _FINAL_SPREAD)
            self._note_missing(compaction.compact(task, self._lock.claim))
        except Exception as error:  # as above
            self._note_failure(error)

    def take_troubles(self) -> list[Trouble]:
        """Returns what went wrong since the last call."""
        troubles, self._troubles = self._troubles, []
        return troubles

    def _header(self) -> frames.Frame:
        value = {
            "attributes": self._attributes,
            "layout": json.loads(self._layout.to_json()),
            "schema": describe_tables(),
        }
        return frames.Frame(frames.HEADER_KIND, self._sequence, self._run, json.dumps(value).encode())

    def _watch_queue(self) -> None:
        trouble = self._journal.trouble
        if trouble is not None and not self._is_waiting:
            kind = "disk_full" if trouble.errno in NO_ROOM else "write_failed"
            why = trouble.strerror or str(trouble)
            sentence = f"{self._paths.directory}: the journal cannot be written ({why.rstrip('.')})."
            self._troubles.append(Trouble(kind, f"{sentence} Training goes on; records wait in memory."))
        num_new = self._journal.num_dropped - self._num_dropped
        if trouble is None and num_new:
            self._num_dropped = self._journal.num_dropped
            self._troubles.append(
                Trouble("dropped_records", f"{lost_records(num_new)}, dropped while the disk took none.")
            )
        self._is_waiting = trouble is not None

    def _note_missing(self, num_missing: int) -> None:
        self._compaction_failed = False
        if num_missing:
            self._troubles.append(Trouble("dropped_records", f"{lost_records(num_missing)}."))

    def _note_failure(self, error: Exception) -> None:
        if not self._compaction_failed:
            self._troubles.append(_failed_compaction(self._paths, error))
        self._compaction_failed = True


def _failed_compaction(paths: RunPaths, error: Exception) -> Trouble:
    """Returns what to say: the disk's complaint, or a bug of ours with where it happened."""
    kind, why, details = "disk_full", str(error), ""
    if not isinstance(error, OSError) or isinstance(error, RunFileError):
        kind, why = "compaction_failed", f"{type(error).__name__}: {error}"
        details = "".join(traceback.format_exception(error))
    why = " ".join(why.split())
    return Trouble(kind, f"{paths.file}: compaction failed ({why}); the journals keep the rows.", details)
