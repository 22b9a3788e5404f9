"""The evidence of one scope: what is due in each update, and what comes of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.evidence.modules import module_grams
from gradscope.probes.evidence.row_meter import RowMeter
from gradscope.probes.evidence.row_records import joined, rows_of_batch
from gradscope.probes.evidence.settings import Evidence, is_due
from gradscope.probes.evidence.spike import SpikeWatch
from gradscope.probes.rows import RowBatch
from gradscope.probes.targets import Layout
from gradscope.runfile.evidence import ModuleEvidence, RowEvidence
from gradscope.runfile.update import UpdateRecord


class Gathering:
    """Fills the evidence of records.

    Args:
        layout: What the scope measures.
        settings: What is asked for.

    Attributes:
        row_meter: What the taps call; None where rows are never asked for.
        num_updates: Policy -> updates so far.
    """

    def __init__(self, layout: Layout, settings: Evidence) -> None:
        self._layout = layout
        self._settings = settings
        measures_rows = settings.rows_every > 0 or settings.top_rows > 0
        self.row_meter = RowMeter(layout, settings) if measures_rows else None
        self.num_updates = dict.fromkeys(layout.policies, 0)
        self._watches = {policy: SpikeWatch() for policy in layout.policies}
        self._spiked: set[str] = set()
        self._problems: WeakKeyDictionary[RowBatch, tuple[Hashable, ...]] = WeakKeyDictionary()

    def begin(self, batch: RowBatch, problems: Sequence[Hashable] | None) -> None:
        """Has the rows of a micro-batch measured, if they are to be.

        Args:
            batch: The micro-batch.
            problems: Problem of each entry.

        Raises:
            ProbeError: It has no row ids.
        """
        if self.row_meter is None:
            return
        if batch.row_ids is None:
            raise ProbeError(
                "rows(): Evidence keeps single rows, which are found by their ids; give row_ids."
            )
        policies = [p for p in self._layout.policies.values() if not batch.slots.isdisjoint(p.slots)]
        whole = any(self._rows_due(policy.name) for policy in policies)
        if whole or self._settings.top_rows:
            self.row_meter.begin(batch, sketches=whole)
            if problems is not None:
                self._problems[batch] = tuple(problems)

    def close(self, sums: SlotAccumulators, batches: Sequence[RowBatch], record: UpdateRecord) -> None:
        """Fills what can be told of an update before the optimizer steps.

        Args:
            sums: The sums of its policy.
            batches: Its micro-batches.
            record: Its record, otherwise complete.
        """
        policy = record.policy
        rows_due = self._rows_due(policy)
        spike = self._watches[policy].update(record.scalars["grad_norm"])
        if self._settings.modules_every and (
            spike or is_due(self._settings.modules_every, self.num_updates[policy])
        ):
            record.modules = _modules(sums, record, whole=self._settings.module_gram)
        if self.row_meter is not None and (rows_due or self._settings.top_rows):
            record.rows = self._rows(sums, batches, top=None if rows_due else self._settings.top_rows)
        self._spiked.discard(policy)
        if spike:
            self._spiked.add(policy)
        self.num_updates[policy] += 1

    def _rows_due(self, policy: str) -> bool:
        every = self._settings.rows_every
        return is_due(every, self.num_updates[policy]) or (every > 0 and policy in self._spiked)

    def _rows(
        self, sums: SlotAccumulators, batches: Sequence[RowBatch], *, top: int | None
    ) -> RowEvidence | None:
        assert self.row_meter is not None
        found = []
        for batch in batches:
            numbers = self.row_meter.finish(batch)
            if numbers is not None:
                found.append(rows_of_batch(batch, numbers, sums.policy.slots, self._problems.get(batch)))
        mine = joined(found, top=top) if found else None
        every = [part for part in sums.reduction.gather(mine) if part is not None]
        return joined(every, top=top) if every else None


def _modules(sums: SlotAccumulators, record: UpdateRecord, *, whole: bool) -> ModuleEvidence:
    """Returns norms, and with `whole` products, of the slots in each module; NaN for slots without rows."""
    num_slots, places = len(record.slots), np.ix_(sums.policy.slots, sums.policy.slots)
    grams = module_grams(sums)
    found = np.full((len(grams), num_slots, num_slots), np.nan)
    for gram, own in zip(found, grams.values(), strict=True):
        gram[places] = own
    found[:, np.isnan(record.gram)] = np.nan
    norms = np.sqrt(np.maximum(np.diagonal(found, axis1=1, axis2=2), 0.0)).T
    return ModuleEvidence(tuple(grams), norms, found if whole else None)
