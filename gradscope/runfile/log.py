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
from gradscope.runfile.damage import lost_records, num_records
from gradscope.runfile.journal import JournalWriter
from gradscope.runfile.layout import Layout
from gradscope.runfile.paths import RunPaths
from gradscope.runfile.resume import Start

_COMPACT_AT_LEAST = 64
_COMPACT_FRACTION = 0.1
_MAX_WAITING = 4096
_FINAL_SPREAD = 1.2


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
        fsync: Whether each record is forced to the disk.
    """

    def __init__(self, paths: RunPaths, start: Start, *, fsync: bool) -> None:
        self._paths = paths
        self._attributes = dict(start.attributes)
        self._layout = start.layout
        self._sequence = start.sequence
        self._num_stored, self._num_pending = start.num_steps, 0
        self._troubles: list[Trouble] = []
        self._is_full = False
        self._num_dropped = 0
        self._compaction_failed = False
        self._running: Future[int] | None = None
        self._journal = JournalWriter(
            paths, start.journal_number, self._header(), fsync=fsync, max_waiting=_MAX_WAITING
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradscope-compaction")

    def put(self, rows: Batch, layout: Layout) -> None:
        """Writes rows as one record, after a header where the layout is new."""
        if layout is not self._layout:
            self._layout = layout
            self._journal.append(self._header())
        self._sequence += 1
        payload = batch.encode(rows, layout)
        self._journal.append(frames.Frame(frames.ROWS_KIND, self._sequence, payload))
        self._num_pending += 1
        self._watch_queue()

    def compact_if_due(self) -> None:
        """Starts a compaction when the journal holds 64 records and a tenth of what is stored."""
        if self._running is not None and self._running.done():
            self.finish_compaction()
        if self._num_pending >= max(_COMPACT_AT_LEAST, _COMPACT_FRACTION * self._num_stored):
            self.start_compaction()

    def start_compaction(self) -> None:
        """Rotates the journal and folds the closed ones in the background; at most one at a time."""
        if self._running is not None and not self._running.done():
            return
        self.finish_compaction()
        try:
            self._journal.rotate(self._header())
        except OSError as error:
            self._note_failure(error)
            return
        self._num_stored, self._num_pending = self._num_stored + self._num_pending, 0
        self._running = self._pool.submit(
            compaction.compact, self._paths, before=self._journal.number, attributes=self._attributes
        )

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
        if self._journal.num_waiting:
            num = self._journal.num_waiting
            self._troubles.append(
                Trouble("dropped_records", f"{num_records(num)} never got onto the full disk.")
            )
        self._journal.close()
        final = {**self._attributes, **attributes}
        try:
            num_missing = compaction.compact(
                self._paths, before=self._journal.number + 1, attributes=final, most_spread=_FINAL_SPREAD
            )
            self._note_missing(num_missing)
        except Exception as error:  # as above
            self._note_failure(error)

    def take_troubles(self) -> list[Trouble]:
        """Returns what went wrong since the last call."""
        troubles, self._troubles = self._troubles, []
        return troubles

    def _header(self) -> frames.Frame:
        value = {"attributes": self._attributes, "layout": json.loads(self._layout.to_json())}
        return frames.Frame(frames.HEADER_KIND, self._sequence, json.dumps(value).encode())

    def _watch_queue(self) -> None:
        is_full = self._journal.num_waiting > 0
        if is_full and not self._is_full:
            self._troubles.append(
                Trouble(
                    "disk_full",
                    f"{self._paths.directory}: the journal cannot be written (disk full?). "
                    "Training goes on; records wait in memory. Make room.",
                )
            )
        num_new = self._journal.num_dropped - self._num_dropped
        if not is_full and num_new:
            self._num_dropped = self._journal.num_dropped
            self._troubles.append(
                Trouble("dropped_records", f"{lost_records(num_new)}, dropped while the disk was full.")
            )
        self._is_full = is_full

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
