"""Cuts the rows of a micro-batch into blocks of one cell each, so that few products do all cells.

Legend: N rows (tokens when packed), S tokens of a row, C cells, B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from gradscope.probes.cells import Cells
from gradscope.probes.rows import RowBatch

BLOCK_TOKENS = 16
"""Smallest number of tokens of a block for which one batched product over blocks pays on a CPU."""
BLOCK_NUMBERS = 1 << 22
"""Most numbers of the blocks of one layer that are held beside the sums (16 MiB in float32) on a CPU."""
GPU_BLOCK_NUMBERS = 1 << 24
"""The same on an accelerator (64 MiB), where a launch costs more than the copy."""
GPU_BLOCKS = 32
"""Batched products of fewer blocks leave an accelerator idle; runs are split to come near this number."""
GPU_BLOCK_TOKENS = 256
"""Blocks are not split below this number of tokens."""


class Step(NamedTuple):
    """Rows that hold one run for each of neighbouring cells, all of one length.

    Attributes:
        start: First row.
        stop: Row after the last.
        cell: First cell.
        num_cells: Number of cells.
        first: Whether nothing was added to these cells before.
    """

    start: int
    stop: int
    cell: int
    num_cells: int
    first: bool

    @property
    def end(self) -> int:
        """Cell after the last."""
        return self.cell + self.num_cells


@dataclass(frozen=True)
class Cut:
    """How the rows of one micro-batch are cut into blocks.

    Attributes:
        bounds: First row and end of each block, after reordering.
        places: Cell of each block, counting within the policy; all cells where there are steps.
        cells: The same on the device, `[B]`.
        order: Rows in the order of the blocks; None where they stay in place.
        filled: Whether an entry of `order` is a row, not padding, `[len(order), 1]`; None where all are.
        rows: Rows of every block; 0 where blocks differ.
        repeats: How often each cell of the policy comes when the blocks go through all of them in order, one
            after the other; 0 where they do not.
        complete: Whether every row is in a block; rows of no slot are in none.
        steps: Products that add up to the cells', in place of one for each block; empty where there is none.
    """

    bounds: tuple[tuple[int, int], ...]
    places: tuple[int, ...]
    cells: torch.Tensor
    order: torch.Tensor | None
    filled: torch.Tensor | None
    rows: int
    repeats: int
    complete: bool
    steps: tuple[Step, ...] = ()


def cut_rows(batch: RowBatch, cells: Cells, device: torch.device, *, tokens: int, numbers: int) -> Cut:
    """Returns the blocks that suit a device and a layer, the same object for the same question.

    Args:
        batch: The rows.
        cells: The cells of the policy whose parameters they go through.
        device: Where the products run.
        tokens: Tokens of a row, S.
        numbers: Parameters of the layer: what one block's product comes to.
    """
    small = numbers * GPU_BLOCKS <= GPU_BLOCK_NUMBERS
    key = (cells, device, tokens, numbers if device.type == "cpu" else small)
    if key not in batch.cuts:
        batch.cuts[key] = (
            cut_for_cpu(batch, cells, tokens=tokens, numbers=numbers)
            if device.type == "cpu"
            else cut_for_gpu(batch, cells, device, tokens=tokens, small=small)
        )
    return cast(Cut, batch.cuts[key])


@dataclass(frozen=True)
class _Plan:
    bounds: list[tuple[int, int]]
    places: list[int]
    order: list[int] | None = None
    padded: list[bool] | None = None
    steps: tuple[Step, ...] = ()


def cut_for_cpu(batch: RowBatch, cells: Cells, *, tokens: int, numbers: int) -> Cut:
    """Equal blocks in place where runs are long enough; else one block a run, or a cell for short runs."""
    place_N = _places(batch, cells)
    return _finish(
        _plan_for_cpu(place_N, len(cells), tokens, numbers), place_N, len(cells), torch.device("cpu")
    )


def cut_for_gpu(batch: RowBatch, cells: Cells, device: torch.device, *, tokens: int, small: bool) -> Cut:
    """Equal blocks always: in place where few enough, else rows are gathered by cell and padded."""
    place_N = _places(batch, cells)
    return _finish(_plan_for_gpu(place_N, len(cells), tokens, small), place_N, len(cells), device)


def _places(batch: RowBatch, cells: Cells) -> list[int]:
    return [cells.local.get(cell, -1) for cell in batch.cell_N]


def _plan_for_cpu(place_N: Sequence[int], num_cells: int, tokens: int, numbers: int) -> _Plan:
    runs = _runs(place_N)
    rows = math.gcd(*(stop - start for _, start, stop in runs))
    in_order = len(runs) == len(set(place_N))
    # Ways to deal with rows out of order, in numbers copied: blocks that are products of their own, rows
    # copied so that each cell is one product (a layer of that many numbers is at least twice their root
    # wide), and products one after the other that are added up where they belong.
    blocks = (len(place_N) // rows - len(set(place_N))) * numbers
    copies = int(2 * len(place_N) * tokens * math.sqrt(numbers))
    steps = _steps(runs) if not in_order and num_cells * numbers <= BLOCK_NUMBERS else ()
    if steps and len(steps) * CALL_NUMBERS < min(blocks, copies):
        return _Plan([(start, stop) for _, start, stop in runs], [place for place, _, _ in runs], steps=steps)
    few = blocks <= copies
    if -1 not in place_N and rows * tokens >= BLOCK_TOKENS and few:
        bounds = [(start, start + rows) for start in range(0, len(place_N), rows)]
        return _Plan(bounds, [place_N[start] for start, _ in bounds])
    order = None
    if not in_order and (not few or len(place_N) * tokens < LONG_RUN_TOKENS * len(runs)):
        order = sorted(range(len(place_N)), key=place_N.__getitem__)
        runs = _runs([place_N[row] for row in order])
    kept = [(place, start, stop) for place, start, stop in runs if place >= 0]
    return _Plan([(start, stop) for _, start, stop in kept], [place for place, _, _ in kept], order)


LONG_RUN_TOKENS = 256
"""Runs at least this long are multiplied where they stand; copying them into the order of the cells costs
more than the calls it saves (one call costs about as much as copying 200 tokens of 64 features, on CPU)."""
CALL_NUMBERS = 1 << 14
"""How many numbers a CPU copies in the time of one call."""


def _steps(runs: Sequence[tuple[int, int, int]]) -> tuple[Step, ...]:
    """Returns the runs, with those together whose cells follow each other and that are of one length."""
    steps: list[Step] = []
    length, seen = 0, set[int]()
    for place, start, stop in runs:
        if place < 0:
            continue
        first, last = place not in seen, steps[-1] if steps else None
        seen.add(place)
        fits = last and (start, place, first) == (last.stop, last.end, last.first)
        if last and fits and stop - start == length:
            steps[-1] = last._replace(stop=stop, num_cells=last.num_cells + 1)
        else:
            length = stop - start
            steps.append(Step(start, stop, place, 1, first))
    return tuple(steps)


def _plan_for_gpu(place_N: Sequence[int], num_cells: int, tokens: int, small: bool) -> _Plan:
    num_rows = len(place_N)
    rows = math.gcd(*(stop - start for _, start, stop in _runs(place_N)))
    if -1 not in place_N and num_rows // rows <= max(2 * GPU_BLOCKS, 4 * num_cells):
        if small:
            rows = _split(num_rows, rows, tokens)
        bounds = [(start, start + rows) for start in range(0, num_rows, rows)]
        return _Plan(bounds, [place_N[start] for start, _ in bounds])
    members: dict[int, list[int]] = {}
    for row in sorted(range(num_rows), key=place_N.__getitem__):
        if place_N[row] >= 0:
            members.setdefault(place_N[row], []).append(row)
    tagged = sum(len(rows_of) for rows_of in members.values())
    most = max((len(rows_of) for rows_of in members.values()), default=1)
    rows = max(1, min(most, tagged // max(GPU_BLOCKS, 4 * len(members))))
    order: list[int] = []
    padded: list[bool] = []
    places: list[int] = []
    for place, rows_of in members.items():
        gap = -len(rows_of) % rows
        order += rows_of + [rows_of[-1]] * gap
        padded += [False] * len(rows_of) + [True] * gap
        places += [place] * ((len(rows_of) + gap) // rows)
    bounds = [(start, start + rows) for start in range(0, len(order), rows)]
    return _Plan(bounds, places, order, padded if any(padded) else None)


def _split(num_rows: int, rows: int, tokens: int) -> int:
    """Returns the rows of a block, a divisor of `rows`, that gives `GPU_BLOCKS` blocks or comes nearest."""
    divisors = [part for part in range(rows, 0, -1) if rows % part == 0]
    long_enough = [part for part in divisors if part * tokens >= GPU_BLOCK_TOKENS] or [rows]
    return next((part for part in long_enough if num_rows // part >= GPU_BLOCKS), long_enough[-1])


def _finish(plan: _Plan, place_N: Sequence[int], num_cells: int, device: torch.device) -> Cut:
    # Products that are added up leave one for each cell.
    parts = list(range(num_cells)) if plan.steps else plan.places
    lengths = {stop - start for start, stop in plan.bounds}
    repeats = len(parts) // num_cells
    regular = parts == [place for place in range(num_cells) for _ in range(repeats)]
    order = None if plan.order is None else torch.tensor(plan.order, device=device, dtype=torch.long)
    padding = plan.padded
    filled = None if padding is None else ~torch.tensor(padding, device=device).unsqueeze(1)
    num_ordered = len(place_N if plan.order is None else plan.order)
    covers = len(lengths) == 1 and plan.bounds[-1][1] == num_ordered
    return Cut(
        bounds=tuple(plan.bounds),
        places=tuple(parts),
        cells=torch.tensor(parts, device=device, dtype=torch.long),
        order=order,
        filled=filled,
        rows=lengths.pop() if covers and _adjoining(plan.bounds) else 0,
        repeats=repeats if regular else 0,
        complete=-1 not in place_N,
        steps=plan.steps,
    )


def _adjoining(bounds: Sequence[tuple[int, int]]) -> bool:
    """Whether blocks start at row 0 and follow each other, so that they are one reshaped tensor."""
    return bool(bounds) and bounds[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(bounds))


def _runs(places: Sequence[int]) -> list[tuple[int, int, int]]:
    starts = [row for row, place in enumerate(places) if row == 0 or place != places[row - 1]]
    return [
        (places[start], start, stop) for start, stop in zip(starts, [*starts[1:], len(places)], strict=True)
    ]
