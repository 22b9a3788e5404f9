"""Which micro-batches have their rows measured one by one, and what the taps hand in of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn

from gradscope.probes.evidence.modules import name_in_model
from gradscope.probes.evidence.row_sums import AddCells, RowNumbers, RowSums
from gradscope.probes.evidence.settings import Evidence
from gradscope.probes.rows import RowBatch
from gradscope.probes.targets import Layout


class RowMeter:
    """Measures rows of the micro-batches that it was told to; the taps of a scope call it.

    Parameters with hooks of their own, which see no rows, are left out of norms and sketches.

    Args:
        layout: What the taps cover.
        settings: Size and seed of the sketches.
    """

    def __init__(self, layout: Layout, settings: Evidence) -> None:
        self._settings = settings
        self._names = {
            id(parameter): name_in_model(name)
            for policy in layout.policies.values()
            for name, parameter in policy.covered.items()
        }
        self._num_uses = Counter(id(p) for target in layout.targets for p in target.parameters.values())
        # A micro-batch whose forward pass failed, or that is never stepped on, goes by itself.
        self._sums: WeakKeyDictionary[RowBatch, RowSums] = WeakKeyDictionary()

    def begin(self, batch: RowBatch, *, sketches: bool) -> None:
        """Measures the rows of a micro-batch from now on."""
        dim = self._settings.sketch_dim if sketches else 0
        self._sums[batch] = RowSums(dim=dim, seed=self._settings.sketch_seed, num_uses=self._num_uses)

    def add(self, batch: RowBatch, parameters: Iterable[nn.Parameter], add_cells: AddCells) -> None:
        """Takes in one call of a module with rows of a micro-batch, if they are measured.

        Args:
            batch: The micro-batch.
            parameters: Those that take part.
            add_cells: Adds their gradients by cell, for any division of the rows.
        """
        if batch in self._sums:
            self._sums[batch].add(batch, {self._names[id(p)]: p for p in parameters}, add_cells)

    def finish(self, batch: RowBatch) -> RowNumbers | None:
        """Returns the numbers of a micro-batch's rows; None where they were not measured."""
        sums = self._sums.get(batch)
        return None if sums is None else sums.finish(batch)
