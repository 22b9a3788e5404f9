"""Blocks of rows for one batched product, as a CPU and as an accelerator likes them: the same sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.cells import Cells
from gradscope.probes.reduction import Reduction
from gradscope.probes.rows import UNTAGGED, RowBatch
from gradscope.probes.taps import blocks as blocks_module
from gradscope.probes.taps import factors as factors_module
from gradscope.probes.taps.blocks import GPU_BLOCKS, cut_for_cpu, cut_for_gpu, cut_rows
from gradscope.probes.taps.factors import Factors, add_factors
from gradscope.probes.targets import Policy

CPU = torch.device("cpu")
EXACT = 1e-12
NUM_SLOTS = 4
ROWS = {
    "equal, in order": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
    "one row a slot": [0, 1, 2, 3],
    "equal blocks twice": [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3],
    "unequal": [0] * 5 + [1] + [2] * 3 + [3] * 2,
    "some slots only": [2, 2, 2, 1, 1, 1],
    "shuffled": [3, 0, 0, 2, 1, 3, 3, 0, 2, 0, 0],
    "rows of no slot": [UNTAGGED, 0, 0, 2, UNTAGGED, 3, 3, 3, UNTAGGED],
    "many short runs": list(np.random.default_rng(0).integers(-1, NUM_SLOTS, 300)),
    "many equal runs": [0, 1, 2, 3] * 90,
    "long runs with padding": [0] * 70 + [1] * 31 + [3] * 49 + [UNTAGGED] * 7,
    "rows of no slot only": [UNTAGGED] * 3,
}


class Layer:
    """Two matrices of rank 3 and a bias, with factors of every token, in the sums of one policy."""

    def __init__(self, slots, tokens, *, side_by_side=True):
        generator = torch.Generator().manual_seed(1)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.batch = RowBatch([int(slot) for slot in slots], list("abcd"), numbers={})
        self.cells, self.tokens = Cells(tuple(range(NUM_SLOTS)), NUM_SLOTS), tokens
        named = {
            "a": nn.Parameter(random(3, 7)),
            "b": nn.Parameter(random(5, 3)),
            "c": nn.Parameter(random(5)),
        }
        covered = named if side_by_side else dict(reversed(named.items()))
        self.sums = SlotAccumulators(Policy("p", self.cells.slots, covered, {}), self.cells, Reduction())
        number = len(slots) * tokens
        x, v, u, dy = random(number, 7), random(number, 3), random(number, 3), random(number, 5)
        a, b, c = named.values()
        self.factors = [Factors(a, v, x), Factors(b, dy, u), Factors(c, dy, None)]

    def add(self, cut, *, totals=True):
        return add_factors(self.factors, cut, self.sums, tokens=self.tokens, totals=totals)

    def expected(self, slot):
        """Each parameter's gradient from the tokens of one slot, or of every slot."""
        wanted = torch.tensor([row == slot if slot is not None else row >= 0 for row in self.batch.slot_N])
        mask = wanted.repeat_interleave(self.tokens).double()[:, None]
        return [
            (left * mask).sum(0) if right is None else (left * mask).T @ right
            for _, left, right in self.factors
        ]

    def check(self, totals, times=1):
        for slot in range(NUM_SLOTS):
            for factors, right in zip(self.factors, self.expected(slot), strict=True):
                found = self.sums.stacked(factors.parameter)[slot]
                torch.testing.assert_close(found, times * right, rtol=EXACT, atol=EXACT)
        for found, right in zip(totals, self.expected(None), strict=True):
            torch.testing.assert_close(found, right, rtol=EXACT, atol=EXACT)


def cuts(layer):
    return {
        "cpu": cut_for_cpu(layer.batch, layer.cells, tokens=layer.tokens, numbers=41),
        "cpu, wide layer": cut_for_cpu(layer.batch, layer.cells, tokens=layer.tokens, numbers=1 << 30),
        "accelerator": cut_for_gpu(layer.batch, layer.cells, CPU, tokens=layer.tokens, small=True),
        "accelerator, large layer": cut_for_gpu(
            layer.batch, layer.cells, CPU, tokens=layer.tokens, small=False
        ),
    }


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_sums_and_totals_whatever_the_cut(rows, tokens, side_by_side):
    for name in cuts(Layer(ROWS[rows], tokens)):
        layer = Layer(ROWS[rows], tokens, side_by_side=side_by_side)
        cut = cuts(layer)[name]
        layer.check(layer.add(cut))
        layer.check(layer.add(cut), times=2)
        assert layer.add(cut, totals=False) is None


@pytest.mark.parametrize("rows", ["shuffled", "rows of no slot", "many short runs", "many equal runs"])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_products_that_are_added_up_where_rows_stand(rows, side_by_side, monkeypatch):
    monkeypatch.setattr(blocks_module, "CALL_NUMBERS", 0)
    layer = Layer(ROWS[rows], 9, side_by_side=side_by_side)
    for factors in layer.factors:  # what an earlier update left there
        layer.sums.stacked(factors.parameter).fill_(torch.nan)
    layer.sums.seen.clear()
    cut = cut_for_cpu(layer.batch, layer.cells, tokens=9, numbers=1 << 16)
    assert cut.steps
    assert cut.order is None
    totals = layer.add(cut)
    layer.check(totals)
    layer.check(layer.add(cut), times=2)


def test_rows_that_take_turns_are_few_products():
    layer = Layer([0, 1, 2, 3] * 8, 64)
    cut = cut_for_cpu(layer.batch, layer.cells, tokens=64, numbers=128 * 384)
    assert len(cut.steps) == 8
    in_order = Layer([slot for slot in range(4) for _ in range(8)], 64)
    assert not cut_for_cpu(in_order.batch, in_order.cells, tokens=64, numbers=128 * 384).steps


@pytest.mark.parametrize("rows", ROWS)
def test_weights_too_large_for_blocks_are_added_one_by_one(rows, monkeypatch):
    monkeypatch.setattr(factors_module, "BLOCK_NUMBERS", 0)
    for name in ("cpu", "accelerator"):
        layer = Layer(ROWS[rows], 5)
        cut = cuts(layer)[name]
        layer.check(layer.add(cut))
        layer.check(layer.add(cut), times=2)


def test_an_accelerator_gets_equal_blocks_without_a_copy_where_it_can():
    layer = Layer([slot for slot in range(NUM_SLOTS) for _ in range(8)], 1024)
    cut = cut_for_gpu(layer.batch, layer.cells, CPU, tokens=1024, small=True)
    assert (cut.rows, cut.order, cut.repeats) == (1, None, 8)
    large = cut_for_gpu(layer.batch, layer.cells, CPU, tokens=1024, small=False)
    assert (large.rows, large.order, large.repeats) == (8, None, 1)
    short = cut_for_gpu(layer.batch, layer.cells, CPU, tokens=64, small=True)
    assert (short.rows, len(short.bounds)) == (4, 8)


def test_an_accelerator_never_gets_many_or_unequal_blocks():
    for name, rows in ROWS.items():
        layer = Layer(rows, 1)
        cut = cut_for_gpu(layer.batch, layer.cells, CPU, tokens=1, small=True)
        assert len(cut.bounds) <= 2 * GPU_BLOCKS + NUM_SLOTS, name
        assert cut.rows or not cut.bounds, name
        padding = 0 if cut.filled is None else int((~cut.filled).sum())
        assert padding <= max(NUM_SLOTS, len(rows) // 4), name


def test_the_same_question_has_the_same_answer():
    layer = Layer(ROWS["unequal"], 2)
    first = cut_rows(layer.batch, layer.cells, CPU, tokens=2, numbers=100)
    assert cut_rows(layer.batch, layer.cells, CPU, tokens=2, numbers=100) is first
    assert cut_rows(layer.batch, layer.cells, CPU, tokens=3, numbers=100) is not first
