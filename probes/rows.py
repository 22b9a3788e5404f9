"""Which slot each row of a micro-batch belongs to, run-length encoded once, and the counts that follow.

Legend: N rows (tokens when packed), K slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope.errors import ProbeError, nearest

UNTAGGED = -1
"""Index of rows that belong to no slot, such as the padding at the end of a packed sequence."""

LONG_RUN_TOKENS = 256
"""Runs at least this long are multiplied where they stand; copying them into slot order would cost more than
the extra calls save (measured on CPU with LoRA of rank 8 and 64 features, where a call costs as much as about
200 tokens)."""


@dataclass(frozen=True)
class Piece:
    """A stretch of rows of one slot; `slot` counts within the policy."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlan:
    """How the rows of a micro-batch are cut into slots for one policy.

    Attributes:
        pieces: The stretches, after reordering where `order` is given; untagged rows are in none.
        order: Row order `[N]` (int64, CPU) that brings each slot's rows together; None where rows stay in place.
        equal: First slot and number of slots when the pieces are one of equal length for each of consecutive
            slots and cover all rows, so that one batched product does them all; None otherwise.
        strangers: Slots (counted over all slots) of rows that the policy does not drive.
    """

    pieces: tuple[Piece, ...]
    order: torch.Tensor | None
    equal: tuple[int, int] | None
    strangers: tuple[int, ...]
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    def order_on(self, device: torch.device) -> torch.Tensor | None:
        """Returns `order` on a device, copied there once."""
        if self.order is None:
            return None
        if device not in self._on_device:
            self._on_device[device] = self.order.to(device)
        return self._on_device[device]


class RowBatch:
    """The rows of one micro-batch: their slots and what the loop said about them.

    Args:
        slot_N: Index of each row's slot, `UNTAGGED` for none.
        names: Names of all slots, by index.
        problems: Problem label of each row; kept for products between halves of the problems.
        row_ids: Name of each row; in a packed batch it tells neighbouring rows of one slot apart.
        numbers: Per-row numbers by name: tokens, advantages, loss_weights; each `[N]`.
    """

    def __init__(
        self,
        slot_N: Sequence[int],
        names: Sequence[str],
        *,
        problems: Sequence[Hashable] | None = None,
        row_ids: Sequence[Hashable] | None = None,
        numbers: Mapping[str, NDArray[np.float64]],
    ) -> None:
        self.slot_N = tuple(slot_N)
        self.names = tuple(names)
        self.problems = problems
        self.row_ids = row_ids
        self.numbers = dict(numbers)
        self.packed = False
        self.slots = frozenset(self.slot_N) - {UNTAGGED}
        self._runs = tuple(_runs(self.slot_N))
        self._plans: dict[tuple[tuple[int, ...], bool], RowPlan] = {}

    def __len__(self) -> int:
        return len(self.slot_N)

    def plan(self, policy_slots: tuple[int, ...], *, tokens_per_row: int) -> RowPlan:
        """Returns how the rows are cut for a policy that drives `policy_slots`.

        Many short runs are sorted together; few or long ones are left in place.
        """
        run_tokens = len(self.slot_N) * tokens_per_row / len(self._runs)
        in_order = len(self._runs) == len({piece.slot for piece in self._runs})
        together = not in_order and run_tokens < LONG_RUN_TOKENS
        return self._plan(policy_slots, together=together)

    def grouped(self, policy_slots: tuple[int, ...]) -> RowPlan:
        """Returns the plan with exactly one piece for each slot that has rows."""
        return self._plan(policy_slots, together=True)

    def _plan(self, policy_slots: tuple[int, ...], *, together: bool) -> RowPlan:
        key = (policy_slots, together)
        if key not in self._plans:
            self._plans[key] = self._make_plan(policy_slots, together=together)
        return self._plans[key]

    def _make_plan(self, policy_slots: tuple[int, ...], *, together: bool) -> RowPlan:
        order, runs = None, self._runs
        if together and len(runs) > len({piece.slot for piece in runs}):
            slots = np.asarray(self.slot_N)
            permutation = np.argsort(slots, kind="stable")
            order = torch.from_numpy(permutation)
            runs = tuple(_runs(slots[permutation].tolist()))
        local = {slot: index for index, slot in enumerate(policy_slots)}
        pieces = tuple(Piece(local[run.slot], run.start, run.stop) for run in runs if run.slot in local)
        strangers = tuple(sorted(self.slots - local.keys()))
        return RowPlan(pieces, order, _equal_slots(pieces, len(self.slot_N)), strangers)


def _runs(slots: Iterable[int]) -> Iterable[Piece]:
    start = 0
    for slot, members in groupby(slots):
        stop = start + sum(1 for _ in members)
        yield Piece(slot, start, stop)
        start = stop


def _equal_slots(pieces: tuple[Piece, ...], num_rows: int) -> tuple[int, int] | None:
    if not pieces or pieces[0].start != 0 or pieces[-1].stop != num_rows:
        return None
    first, length = pieces[0].slot, pieces[0].stop
    for index, piece in enumerate(pieces):
        if piece.slot != first + index or piece.stop - piece.start != length or piece.start != index * length:
            return None
    return first, len(pieces)


def read_rows(
    slot_of_each_row: Sequence[str | None],
    slot_index: Mapping[str, int],
    *,
    problems: Sequence[Hashable] | None,
    row_ids: Sequence[Hashable] | None,
    numbers: Mapping[str, Sequence[float] | None],
) -> RowBatch:
    """Returns the checked rows of one micro-batch.

    Raises:
        ProbeError: An unknown slot, no rows, or a sequence that has not one entry for each row.
    """
    if isinstance(slot_of_each_row, str):
        raise ProbeError(
            f"rows(): got the single string '{slot_of_each_row}'; give a list with one slot name for each row."
        )
    names = list(slot_of_each_row)
    if not names:
        raise ProbeError("rows(): got no rows; give one slot name for each row of the micro-batch.")
    try:
        slot_N = [UNTAGGED if name is None else slot_index[name] for name in names]
    except KeyError as error:
        name = str(error.args[0])
        raise ProbeError(
            f"rows(): unknown slot '{name}'.{nearest(name, slot_index)} Allowed: {', '.join(slot_index)} (or None "
            "for a row of no slot, such as padding)."
        ) from None
    given: dict[str, Sequence[object] | None] = {"problems": problems, "row_ids": row_ids, **numbers}
    for label, values in given.items():
        if values is not None and len(values) != len(names):
            raise ProbeError(
                f"rows(): {label} has {len(values)} entries, slot_of_each_row has {len(names)}; give one for each row."
            )
    arrays = {
        label: np.asarray(values, dtype=np.float64) for label, values in numbers.items() if values is not None
    }
    return RowBatch(slot_N, tuple(slot_index), problems=problems, row_ids=row_ids, numbers=arrays)
