"""The gradient norm and the sketch of every row of a micro-batch, added up while its backward passes by.

A row is looked at as a cell of its own, so that the products of cells, whatever the kind of module, give its
gradient, one module at a time; of that only the squared norm and the sketch stay. The gradients of all rows
in all modules are never there together.

Legend: N entries of a micro-batch (tokens when packed), R its rows, P numbers of a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.cells import Cells
from gradscope.probes.counts import row_starts
from gradscope.probes.evidence.sketch import sketch
from gradscope.probes.reduction import Reduction
from gradscope.probes.rows import UNTAGGED, RowBatch
from gradscope.probes.targets import Policy

Array = NDArray[np.float64]

LARGEST = 1 << 26
"""Numbers of the gradients of rows that are held at once (256 MiB in float32)."""

AddCells = Callable[[RowBatch, SlotAccumulators], object]
"""Adds one module's gradients to the sums of the cells of a batch, for any division of it into cells."""


@dataclass(frozen=True)
class RowNumbers:
    """What was measured of the rows of a micro-batch.

    Attributes:
        starts: First entry of each row, `[R]`.
        norms: Gradient norms, `[R]`; NaN where they cannot be had.
        sketches: Sketches, `[R, S]`; None without.
    """

    starts: NDArray[np.int64]
    norms: Array
    sketches: Array | None


class RowSums:
    """Squared norms and sketches of the rows of one micro-batch.

    The gradients of a parameter that several modules share are added before they are squared, so they are
    held until all have arrived. Norms are NaN where such gradients are too many numbers to be held, and once
    where a parameter turns out to be used more often than was known; sketches are linear and need neither.

    Args:
        dim: Numbers of a sketch, 0 for none.
        seed: Seed of the sketches.
        num_uses: Parameter id -> number of calls that use it in one pass; raised when there are more.
    """

    def __init__(self, *, dim: int, seed: int, num_uses: Counter[int]) -> None:
        self._dim = dim
        self._seed = seed
        self._num_uses = num_uses
        self._arrived: Counter[int] = Counter()
        self._held: dict[int, torch.Tensor] = {}
        self._norms_known = True
        self._portions: dict[range, RowBatch] = {}
        self._row_of_entry: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._num_rows = 0
        self._squares_R: torch.Tensor | None = None
        self._sketches_RS: torch.Tensor | None = None

    def add(self, batch: RowBatch, parameters: Mapping[str, nn.Parameter], add_cells: AddCells) -> None:
        """Takes in one call of a module.

        Args:
            batch: The micro-batch.
            parameters: Parameters that take part, by name in the model.
            add_cells: Adds their gradients by cell.
        """
        first = next(iter(parameters.values()))
        if self._squares_R is None:
            self._begin(batch, first.device)
        for portion in _portions(self._num_rows, sum(p.numel() for p in parameters.values())):
            policy = Policy("rows", tuple(portion), dict(parameters), {})
            sums = SlotAccumulators(policy, Cells(policy.slots, self._num_rows), Reduction())
            add_cells(self._rows_of(batch, portion), sums)
            for name, parameter in parameters.items():
                self._take(name, parameter, portion, sums.stacked(parameter).flatten(1))
        for parameter in parameters.values():
            self._count(parameter)

    def finish(self, batch: RowBatch) -> RowNumbers:
        """Returns the numbers of all rows; those of which nothing arrived have no gradient."""
        starts = row_starts(batch)
        for gradients in self._held.values():
            self._square(gradients, slice(None))
        self._held.clear()
        self._num_uses |= self._arrived
        if self._squares_R is None:
            zeros = np.zeros((len(starts), self._dim))
            return RowNumbers(starts, np.zeros(len(starts)), zeros if self._dim else None)
        squares = self._squares_R.cpu().numpy()
        norms = np.sqrt(squares) if self._norms_known else np.full(len(starts), np.nan)
        sketches = None if self._sketches_RS is None else self._sketches_RS.cpu().numpy()
        return RowNumbers(starts, norms, sketches)

    def _begin(self, batch: RowBatch, device: torch.device) -> None:
        starts = row_starts(batch)
        lengths = np.diff(starts, append=len(batch))
        self._num_rows = len(starts)
        self._row_of_entry = np.repeat(np.arange(len(starts)), lengths)
        self._squares_R = torch.zeros(len(starts), dtype=torch.float64, device=device)
        if self._dim:
            self._sketches_RS = torch.zeros(len(starts), self._dim, dtype=torch.float64, device=device)

    def _rows_of(self, batch: RowBatch, portion: range) -> RowBatch:
        """Returns the micro-batch with the rows of a portion as slots; the others belong to none."""
        if portion not in self._portions:
            slot_N = [
                int(row) if row in portion and slot != UNTAGGED else UNTAGGED
                for row, slot in zip(self._row_of_entry, batch.slot_N, strict=True)
            ]
            names = [str(row) for row in range(self._num_rows)]
            self._portions[portion] = RowBatch(slot_N, names, numbers={})
        return self._portions[portion]

    def _take(self, name: str, parameter: nn.Parameter, portion: range, gradients_RP: torch.Tensor) -> None:
        rows = slice(portion.start, portion.stop)
        if self._sketches_RS is not None:
            self._sketches_RS[rows] += sketch(gradients_RP, name, dim=self._dim, seed=self._seed)
        if self._num_uses[id(parameter)] <= 1:
            self._square(gradients_RP, rows)
        elif self._num_rows * parameter.numel() > LARGEST:
            self._norms_known = False
        elif id(parameter) in self._held:
            self._held[id(parameter)][rows] += gradients_RP
        else:
            # A whole new tensor, not the sums: of several portions each brings its rows.
            self._held[id(parameter)] = gradients_RP.new_zeros(self._num_rows, gradients_RP.shape[1])
            self._held[id(parameter)][rows] = gradients_RP

    def _square(self, gradients_RP: torch.Tensor, rows: slice) -> None:
        assert self._squares_R is not None
        self._squares_R[rows] += torch.linalg.vector_norm(gradients_RP, dim=1, dtype=torch.float64) ** 2

    def _count(self, parameter: nn.Parameter) -> None:
        key = id(parameter)
        self._arrived[key] += 1
        known = max(1, self._num_uses[key])
        if self._arrived[key] > known:
            self._norms_known = False
        elif self._arrived[key] == known and key in self._held:
            self._square(self._held.pop(key), slice(None))


def _portions(num_rows: int, numbers: int) -> Iterator[range]:
    """Divides rows so that the gradients of one portion, `numbers` a row, are few enough to be held."""
    size = max(1, LARGEST // max(1, numbers))
    for start in range(0, num_rows, size):
        yield range(start, min(start + size, num_rows))
