"""How rows are cut into slots, and that every way of cutting gives the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.probes.cells import Cells
from gradscope.probes.rows import UNTAGGED, RowBatch

CPU = torch.device("cpu")
ALL = Cells((0, 1, 2), 3)
LAST_TWO = Cells((1, 2), 3)


def pieces(plan):
    return [(piece.cell, piece.start, piece.stop) for piece in plan.pieces]


def batch(*slots):
    return RowBatch(slots, ("a", "b", "c"), numbers={})


def test_rows_in_slot_order_stay_in_place():
    plan = batch(0, 0, 2).plan(ALL, CPU)
    assert plan.order is None
    assert pieces(plan) == [(0, 0, 2), (2, 2, 3)]


def test_rows_that_alternate_are_brought_together():
    plan = batch(0, 1, 0, 1).plan(ALL, CPU)
    assert plan.order.tolist() == [0, 2, 1, 3]
    assert pieces(plan) == [(0, 0, 2), (1, 2, 4)]


def test_slots_are_counted_within_the_policy_and_untagged_rows_left_out():
    plan = batch(2, 2, UNTAGGED, 1).plan(LAST_TWO, CPU)
    assert pieces(plan) == [(1, 0, 2), (0, 3, 4)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "names"),
    [
        ([300, 300, 300], "aba"),  # long runs, left in place or as blocks
        ([7, 5, 6, 2, 3], "abcab"),  # short runs, sorted
        ([64, 64, 64], "abc"),  # one product
        ([1, 1, 1, 1, 1, 1], "abcabc"),  # too little in each block
    ],
)
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (5, 3)])
def test_every_way_of_cutting_gives_the_same(packed, lengths, names, inputs, outputs):
    torch.manual_seed(0)
    tags = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
    model = nn.Sequential(nn.Linear(inputs, outputs)).double()
    x = torch.randn(len(tags), inputs, dtype=torch.float64)
    weight = torch.randn(len(tags), outputs, dtype=torch.float64)
    with probes.attach(model, {name: name for name in "abc"}) as scope:
        with scope.rows(tags):
            y = model(x[None])[0] if packed else model(x)
        (y * weight).sum().backward()
        for name in "abc":
            own = torch.tensor([tag == name for tag in tags])
            found = scope.slot_gradients(name)
            torch.testing.assert_close(found["0.weight"], weight[own].T @ x[own], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["0.bias"], weight[own].sum(0), rtol=1e-12, atol=1e-12)
