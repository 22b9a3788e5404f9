"""Which slot, and which cell of it, each row of a micro-batch belongs to, run-length encoded once.

Legend: N rows (tokens when packed), K slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope.probes.cells import Cells, cell_code

UNTAGGED = -1
"""Index of rows that belong to no slot, such as the padding at the end of a packed sequence."""


@dataclass(frozen=True)
class Piece:
    """A stretch of rows of one cell; `cell` counts within the policy."""

    cell: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlan:
    """How the rows of a micro-batch are cut into cells for one policy.

    Attributes:
        pieces: The stretches, after reordering where `order` is given; untagged rows are in none.
        order: Row order `[N]` that brings each cell's rows together; None where rows stay in place.
    """

    pieces: tuple[Piece, ...]
    order: torch.Tensor | None


class RowBatch:
    """The rows of one micro-batch: their slots and what the loop said about them.

    Args:
        slot_N: Index of each row's slot, `UNTAGGED` for none.
        names: Names of all slots, by index.
        half_N: Half of the update's problems that each row belongs to, None where its problem is not known;
            None without problems.
        label_N: Number of each row's label; None where no labels are declared.
        num_labels: Number of declared labels, 1 where there are none.
        problems: Problem of each row.
        row_ids: Name of each row; in a packed batch it tells neighbouring rows of one slot apart.
        numbers: Per-row numbers by name: tokens, advantages, loss_weights; each `[N]`.
        packed: What the loop said about the rows being tokens of packed rows; None where it said nothing.

    Attributes:
        tapped: Whether a forward pass that can be differentiated was run with these rows.
        cell_N: Number of each row's cell among those of all slots, `UNTAGGED` for none.
        halved: Whether rows carry problems.
        cuts: What taps worked out about these rows, by question (`taps.blocks`).
        without_problem: Slots of which some row has no known problem.
    """

    def __init__(
        self,
        slot_N: Sequence[int],
        names: Sequence[str],
        *,
        half_N: Sequence[int | None] | None = None,
        label_N: Sequence[int] | None = None,
        num_labels: int = 1,
        problems: Sequence[Hashable] | None = None,
        row_ids: Sequence[Hashable] | None = None,
        numbers: Mapping[str, NDArray[np.float64]],
        packed: bool | None = None,
    ) -> None:
        self.slot_N = tuple(slot_N)
        self.names = tuple(names)
        halves: Sequence[int | None] = [None] * len(self.slot_N) if half_N is None else half_N
        labels = [0] * len(self.slot_N) if label_N is None else label_N
        self.cell_N = tuple(
            UNTAGGED
            if slot == UNTAGGED
            else cell_code(half or 0, slot, label, num_slots=len(self.names), num_labels=num_labels)
            for slot, half, label in zip(self.slot_N, halves, labels, strict=True)
        )
        self.halved = half_N is not None
        self.without_problem = frozenset(
            slot for slot, half in zip(self.slot_N, halves, strict=True) if half is None
        ) - {UNTAGGED}
        self.problems = None if problems is None else tuple(problems)
        self.row_ids = row_ids
        self.numbers = dict(numbers)
        self._said_packed = packed
        self._seen_packed: bool | None = None
        self.tapped = False
        self.slots = frozenset(self.slot_N) - {UNTAGGED}
        self.cuts: dict[Hashable, object] = {}
        self._runs = tuple(_runs(self.cell_N))
        self._places: dict[tuple[Cells, torch.device], torch.Tensor] = {}
        self._plans: dict[tuple[Cells, torch.device], RowPlan] = {}

    def __len__(self) -> int:
        return len(self.slot_N)

    @property
    def packed(self) -> bool:
        """Whether the rows are tokens of packed rows, told by the best there is.

        That is the shape first seen in a forward pass; else what the loop said; else whether row ids repeat.
        """
        if self._seen_packed is not None:
            return self._seen_packed
        if self._said_packed is not None:
            return self._said_packed
        return self.row_ids is not None and len(set(self.row_ids)) < len(self)

    def see(self, row_axes: Sequence[int]) -> bool | None:
        """Learns from the leading axes of a module's input whether the rows are packed.

        Returns:
            Whether they are; None where the axes fit neither, `[N, ...]` nor `[1, N, ...]`.
        """
        packed = None
        if tuple(row_axes[:1]) == (len(self),):
            packed = False
        elif tuple(row_axes[:2]) == (1, len(self)):
            packed = True
        if self._seen_packed is None:
            self._seen_packed = packed
        return packed

    @property
    def repeats_ids(self) -> bool:
        """Whether rows that are not packed share an id; None is none."""
        ids = [name for name in self.row_ids or () if name is not None]
        return self._seen_packed is False and len(set(ids)) < len(ids)

    def shared(self, row_axes: Sequence[int]) -> bool:
        """Whether one row stands for all: a single one where earlier modules saw as many as announced."""
        return self._seen_packed is False and len(self) > 1 and tuple(row_axes[:1]) == (1,)

    def num_rows(self, cells: Cells) -> NDArray[np.int64]:
        """Returns the number of rows (tokens when packed) in each of a policy's cells, `[C]`."""
        numbers = np.zeros(len(cells), dtype=np.int64)
        for run in self._runs:
            if run.cell in cells.local:
                numbers[cells.local[run.cell]] += run.stop - run.start
        return numbers

    def places(self, cells: Cells, device: torch.device) -> torch.Tensor:
        """Returns where each row's cell is among those of a policy, `[N]`; C for a row of none of them."""
        key = (cells, device)
        if key not in self._places:
            places = [cells.local.get(cell, len(cells)) for cell in self.cell_N]
            self._places[key] = torch.tensor(places, device=device)
        return self._places[key]

    def plan(self, cells: Cells, device: torch.device) -> RowPlan:
        """Returns how the rows are cut into the cells of a policy, one piece a cell."""
        together = len(self._runs) > len({run.cell for run in self._runs})
        key = (cells, device)
        if key not in self._plans:
            self._plans[key] = self._make_plan(cells, device, together=together)
        return self._plans[key]

    def _make_plan(self, cells: Cells, device: torch.device, *, together: bool) -> RowPlan:
        order, runs = None, self._runs
        if together:
            permutation = np.argsort(np.asarray(self.cell_N), kind="stable")
            order = torch.from_numpy(permutation).to(device)
            runs = tuple(_runs(self.cell_N[row] for row in permutation))
        local = cells.local
        pieces = tuple(Piece(local[run.cell], run.start, run.stop) for run in runs if run.cell in local)
        return RowPlan(pieces, order)


def _runs(cells: Iterable[int]) -> Iterable[Piece]:
    start = 0
    for cell, members in groupby(cells):
        stop = start + sum(1 for _ in members)
        yield Piece(cell, start, stop)
        start = stop
