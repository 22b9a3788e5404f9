"""Which slot each row of a micro-batch belongs to, run-length encoded once, and the counts that follow.

Legend: N rows (tokens when packed), K slots.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope.errors import ProbeError, nearest

UNTAGGED = -1
"""Index of rows that belong to no slot, such as the padding at the end of a packed sequence."""

LONG_RUN_TOKENS = 256
"""Runs at least this long are multiplied where they stand; copying them into slot order costs more than
the calls it saves (one call costs about as much as copying 200 tokens of 64 features, on CPU)."""


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
        order: Row order `[N]` that brings each slot's rows together; None where rows stay in place.
    """

    pieces: tuple[Piece, ...]
    order: torch.Tensor | None


@dataclass(frozen=True)
class RowBlocks:
    """The rows of a micro-batch as equal blocks, each of one slot, so that one batched product does all.

    Attributes:
        rows: Rows of a block, the largest number that divides every run.
        slots: Slot of each block, counting within the policy, `[B]`.
        is_every_slot: Whether the blocks are the policy's slots, each once and in order.
    """

    rows: int
    slots: torch.Tensor
    is_every_slot: bool


class RowBatch:
    """The rows of one micro-batch: their slots and what the loop said about them.

    Args:
        slot_N: Index of each row's slot, `UNTAGGED` for none.
        names: Names of all slots, by index.
        problems: Problem label of each row; kept for products between halves of the problems.
        row_ids: Name of each row; in a packed batch it tells neighbouring rows of one slot apart.
        numbers: Per-row numbers by name: tokens, advantages, loss_weights; each `[N]`.
        packed: What the loop said about the rows being tokens of packed rows; None where it said nothing.

    Attributes:
        tapped: Whether a forward pass that can be differentiated was run with these rows.
    """

    def __init__(
        self,
        slot_N: Sequence[int],
        names: Sequence[str],
        *,
        problems: Sequence[Hashable] | None = None,
        row_ids: Sequence[Hashable] | None = None,
        numbers: Mapping[str, NDArray[np.float64]],
        packed: bool | None = None,
    ) -> None:
        self.slot_N = tuple(slot_N)
        self.names = tuple(names)
        self.problems = problems
        self.row_ids = row_ids
        self.numbers = dict(numbers)
        self._said_packed = packed
        self._seen_packed: bool | None = None
        self.tapped = False
        self.slots = frozenset(self.slot_N) - {UNTAGGED}
        self._runs = tuple(_runs(self.slot_N))
        self._plans: dict[tuple[tuple[int, ...], bool, torch.device], RowPlan] = {}
        self._blocks: dict[tuple[tuple[int, ...], torch.device], RowBlocks | None] = {}

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

    def plan(
        self, policy_slots: tuple[int, ...], device: torch.device, *, tokens_per_row: int | None = None
    ) -> RowPlan:
        """Returns how the rows are cut for a policy that drives `policy_slots`.

        Many short runs are sorted together, few or long ones are left in place; without `tokens_per_row` each
        slot gets one piece.
        """
        in_order = len(self._runs) == len({run.slot for run in self._runs})
        run_tokens = 0.0 if tokens_per_row is None else len(self) * tokens_per_row / len(self._runs)
        together = not in_order and run_tokens < LONG_RUN_TOKENS
        key = (policy_slots, together, device)
        if key not in self._plans:
            self._plans[key] = self._make_plan(policy_slots, device, together=together)
        return self._plans[key]

    def blocks(self, policy_slots: tuple[int, ...], device: torch.device) -> RowBlocks | None:
        """Returns the rows as equal blocks; None where some rows belong to no slot of the policy."""
        key = (policy_slots, device)
        if key not in self._blocks:
            self._blocks[key] = self._make_blocks(policy_slots, device)
        return self._blocks[key]

    def _make_plan(self, policy_slots: tuple[int, ...], device: torch.device, *, together: bool) -> RowPlan:
        order, runs = None, self._runs
        if together:
            permutation = np.argsort(np.asarray(self.slot_N), kind="stable")
            order = torch.from_numpy(permutation).to(device)
            runs = tuple(_runs(self.slot_N[row] for row in permutation))
        local = {slot: index for index, slot in enumerate(policy_slots)}
        pieces = tuple(Piece(local[run.slot], run.start, run.stop) for run in runs if run.slot in local)
        return RowPlan(pieces, order)

    def _make_blocks(self, policy_slots: tuple[int, ...], device: torch.device) -> RowBlocks | None:
        if not self.slots.issubset(policy_slots) or UNTAGGED in self.slot_N:
            return None
        rows = math.gcd(*(run.stop - run.start for run in self._runs))
        slots = [policy_slots.index(slot) for slot in self.slot_N[::rows]]
        is_every_slot = slots == list(range(len(policy_slots)))
        return RowBlocks(rows, torch.tensor(slots, device=device), is_every_slot)


def _runs(slots: Iterable[int]) -> Iterable[Piece]:
    start = 0
    for slot, members in groupby(slots):
        stop = start + sum(1 for _ in members)
        yield Piece(slot, start, stop)
        start = stop


def read_rows(
    slot_of_each_row: Sequence[str | None],
    slot_index: Mapping[str, int],
    *,
    problems: Sequence[Hashable] | None,
    row_ids: Sequence[Hashable] | None,
    numbers: Mapping[str, Sequence[float] | None],
    packed: bool | None = None,
) -> RowBatch:
    """Returns the checked rows of one micro-batch.

    Raises:
        ProbeError: An unknown slot, no rows, or a sequence that has not one entry for each row.
    """
    if isinstance(slot_of_each_row, str):
        raise ProbeError(
            f"rows(): got the single string '{slot_of_each_row}'; give a list with one slot name for each "
            "row."
        )
    names = list(slot_of_each_row)
    if not names:
        raise ProbeError("rows(): got no rows; give one slot name for each row of the micro-batch.")
    try:
        slot_N = [UNTAGGED if name is None else slot_index[name] for name in names]
    except KeyError as error:
        name = str(error.args[0])
        raise ProbeError(
            f"rows(): unknown slot '{name}'.{nearest(name, slot_index)} Allowed: {', '.join(slot_index)} (or "
            "None for a row of no slot, such as padding)."
        ) from None
    given: dict[str, Sequence[object] | None] = {"problems": problems, "row_ids": row_ids, **numbers}
    for label, values in given.items():
        if values is not None and len(values) != len(names):
            raise ProbeError(
                f"rows(): {label} has {len(values)} entries, slot_of_each_row has {len(names)}; give one for "
                "each row."
            )
    arrays = {
        label: np.asarray(values, dtype=np.float64) for label, values in numbers.items() if values is not None
    }
    return RowBatch(
        slot_N, tuple(slot_index), problems=problems, row_ids=row_ids, numbers=arrays, packed=packed
    )
