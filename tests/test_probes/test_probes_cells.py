"""Cells: how rows are numbered, and Grams over slots x labels against one backward for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope import probes
from gradscope.probes.cells import Cells, cell_code
from gradscope.probes.halves import Halves
from gradscope.probes.rows import UNTAGGED, RowBatch

LABELS = ("right", "wrong")
SLOTS = ["solver/0", "judge/0", "solver/0", "solver/0", "judge/0", "judge/0", "solver/0"]
ROW_LABELS = ["right", "wrong", "wrong", "right", "wrong", "wrong", "right"]


def test_cells_of_a_policy_are_numbered_halves_first_and_labels_last():
    cells = Cells((1, 3), num_slots=4, num_labels=2, num_halves=2)
    assert len(cells) == 8
    codes = [
        cell_code(half, slot, label, num_slots=4, num_labels=2)
        for half in range(2)
        for slot in (1, 3)
        for label in range(2)
    ]
    assert [cells.local[code] for code in codes] == list(range(8))
    assert cells.of_slot(1) == [2, 3, 6, 7]
    assert Cells((1, 3), num_slots=4, num_labels=2).halved() == cells
    assert cells.parts([5, 7]).tolist() == [5, 5, 7, 7] * 2


def test_rows_are_counted_in_their_cells():
    cells = Cells((0, 1), num_slots=2, num_halves=2)
    batch = RowBatch([0, 0, 1, UNTAGGED, 0], "ab", half_N=[0, 1, 1, None, 1], numbers={})
    assert batch.num_rows(cells).tolist() == [1, 0, 2, 1]
    assert batch.halved
    assert batch.without_problem == frozenset()


def test_problems_take_turns():
    halves = Halves()
    assert [halves.of(problem) for problem in "abacbd"] == [0, 1, 0, 0, 1, 1]
    halves.clear()
    assert halves.of("b") == 0


def test_one_infinite_slot_leaves_the_others_products_alone():
    cells = Cells((0, 1), num_slots=2, num_labels=2)
    products = np.eye(4)
    products[3] = products[:, 3] = np.nan
    assert cells.gram(products)[0, 0] == 2
    assert np.isnan(cells.gram(products)[1, 1])


@pytest.mark.parametrize("problems", [None, list("pqrpqrp")])
def test_gram_of_slots_and_labels(toy, problems):
    model, (x, y) = toy.model(), toy.data(7)
    truth = {}
    for slot in toy.slots:
        for label in LABELS:
            rows = [r for r in range(7) if SLOTS[r] == slot and ROW_LABELS[r] == label]
            loss = ((model(x[rows]) - y[rows]) ** 2).sum()
            truth[slot, label] = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, model.parameters())]
            )
    with probes.attach(model, toy.slots, labels=LABELS) as scope:
        toy.run(scope, model, SLOTS, problems=problems, labels=ROW_LABELS)
        record = scope.step(toy.sgd(model))
    vectors = torch.stack(list(truth.values()))
    expected = (vectors @ vectors.T).numpy().reshape(2, 2, 2, 2)
    found = record.label_gram
    assert record.labels == LABELS
    # The judge has no right rows.
    assert np.isnan(found[1, 0]).all()
    assert np.isnan(found[:, :, 1, 0]).all()
    there = ~np.isnan(found)
    assert there.sum() == 9
    np.testing.assert_allclose(found[there], expected[there], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(record.gram, expected.sum((1, 3)), rtol=1e-12)


def test_labels_of_packed_tokens(toy):
    """One sequence of seven tokens, each tagged by itself."""
    torch.manual_seed(0)
    model, (x, _) = torch.nn.Sequential(torch.nn.Linear(3, 2)).double(), toy.data(7)
    with probes.attach(model, toy.slots, labels=LABELS) as scope:
        with scope.rows(SLOTS, problems=list("pqrpqrp"), labels=ROW_LABELS):
            loss = (model(x[None])[0] ** 3).sum()
        loss.backward()
        found = scope.step(toy.sgd(model)).label_gram
    rows = [r for r in range(7) if SLOTS[r] == "solver/0" and ROW_LABELS[r] == "right"]
    model.zero_grad()
    (model(x[rows]) ** 3).sum().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert found[0, 0, 0, 0] == pytest.approx(float(norm) ** 2, rel=1e-12)


def test_labels_are_checked(toy):
    model = toy.model()
    with pytest.raises(probes.ProbeError, match="'right' twice"):
        probes.attach(model, toy.slots, labels=("right", "right"))
    with pytest.raises(probes.ProbeError, match="2 slots x 17 labels are 34, allowed are 32"):
        probes.attach(model, toy.slots, labels=[str(number) for number in range(17)])
    with pytest.raises(probes.ProbeError, match="the single string 'right'"):
        probes.attach(model, toy.slots, labels="right")
    scope = probes.attach(model, toy.slots)
    with pytest.raises(probes.ProbeError, match="none are declared"):
        toy.run(scope, model, SLOTS, labels=ROW_LABELS)
    scope.detach()
    with probes.attach(model, toy.slots, labels=LABELS) as scope:
        with pytest.raises(probes.ProbeError, match="give one for each row"):
            toy.run(scope, model, SLOTS)
        with pytest.raises(probes.ProbeError, match=r"unknown label 'rigth'\. Did you mean 'right'"):
            toy.run(scope, model, SLOTS, labels=["rigth", *ROW_LABELS[1:]])
        with pytest.raises(probes.ProbeError, match="labels has 6 entries"):
            toy.run(scope, model, SLOTS, labels=ROW_LABELS[1:])
