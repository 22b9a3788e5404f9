"""Products between halves of the problems, against one backward for each slot and half."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope import probes

UNEVEN = (3, 2, 4, 1)


def halves_of(problems):
    """Problems take turns in the order of their first appearance."""
    order = list(dict.fromkeys(problems))
    return [order.index(problem) % 2 for problem in problems]


def expected_cross(nano, model, batches, problems):
    """C_kl from separate backwards of each slot's rows in each half."""
    halves = halves_of([problem for part in problems for problem in part])
    vectors = {}
    for slot in nano.slots:
        for half in range(2):
            model.zero_grad()
            place = 0
            for batch in batches:
                rows = [
                    row
                    for row, name in enumerate(batch.slots)
                    if name == slot and halves[place + row] == half
                ]
                place += len(batch.slots)
                if rows:
                    nano.loss(model, batch.take(rows)).backward()
            vectors[slot, half] = torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in model.parameters()
                    if p.requires_grad
                ]
            )
    model.zero_grad(set_to_none=True)
    a, b = (torch.stack([vectors[slot, half] for slot in nano.slots]).numpy() for half in range(2))
    return a @ b.T + b @ a.T


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("per_batch", [1, 2])
def test_cross_products_equal_separate_backwards(nano, full, per_batch):
    model = nano.model() if full else nano.lora()
    batches = [nano.shuffled(UNEVEN, seed=seed) for seed in range(per_batch)]
    names = np.random.default_rng(5).permutation([f"p{row % 5}" for row in range(10 * per_batch)]).tolist()
    problems = [names[10 * part : 10 * part + 10] for part in range(per_batch)]
    expected = expected_cross(nano, model, batches, problems)
    gradients = nano.separate(model, batches)
    with probes.attach(model, nano.slots) as scope:
        for batch, named in zip(batches, problems, strict=True):
            with scope.rows(batch.slots, problems=named):
                loss = nano.loss(model, batch)
            loss.backward()
        record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    # One row can be in one half only.
    halves = halves_of(names)
    slots = [slot for batch in batches for slot in batch.slots]
    present = np.array(
        [[(slot, half) in set(zip(slots, halves, strict=True)) for half in range(2)] for slot in nano.slots]
    )
    there = np.outer(present[:, 0], present[:, 1])
    there = there | there.T
    assert not there.all() or per_batch == 2
    np.testing.assert_array_equal(~np.isnan(record.gram_cross), there)
    norms = np.sqrt(np.diag(nano.gram(gradients)))
    errors = np.abs(record.gram_cross - expected) / np.outer(norms, norms)
    assert np.nanmax(errors) <= 1e-12
    assert nano.gram_error(record.gram, nano.gram(gradients)) <= 1e-12


def test_without_problems_there_is_no_cross_product(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, ["solver/0", "judge/0"])
        assert scope.step(toy.sgd(model)).gram_cross is None


def test_one_problem_alone_has_no_cross_product(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, ["solver/0", "judge/0"], problems=["p", "p"])
        record = scope.step(toy.sgd(model))
    assert np.isnan(record.gram_cross).all()
    assert record.gram_cross.shape == (2, 2)


def test_a_slot_with_a_row_of_unknown_problem_has_no_cross_product(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, ["solver/0"] * 2 + ["judge/0"] * 3, problems=["p", "q", "p", None, "q"])
        cross = scope.step(toy.sgd(model)).gram_cross
    assert np.isfinite(cross[0, 0])
    assert np.isnan(cross[1]).all()
    assert np.isnan(cross[0, 1])


def test_problems_that_come_late_do_not_lose_what_was_there(toy):
    model = toy.model()
    slots = ["solver/0", "judge/0", "judge/0"]
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, slots)
        before = scope.slot_gradients("judge/0")
        toy.run(scope, model, slots, problems=["p", "q", "r"])
        after = scope.slot_gradients("judge/0")
        record = scope.step(toy.sgd(model))
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], 2 * gradient, rtol=1e-12, atol=1e-14)
    assert np.isnan(record.gram_cross).all()  # some rows of either slot are of no known problem
    assert (np.diag(record.gram) > 0).all()


def test_halves_start_anew_with_each_update(toy):
    model = toy.model()
    slots, crosses = ["solver/0", "judge/0", "judge/0"], []
    with probes.attach(model, toy.slots) as scope:
        for problems in (["p", "q", "r"], ["q", "s", "p"]):
            toy.run(scope, model, slots, problems=problems)
            crosses.append(scope.step(toy.sgd(model)).gram_cross)
            model.zero_grad()
    np.testing.assert_allclose(crosses[0], crosses[1], rtol=1e-12)


def test_verify_leaves_the_halves_alone(toy):
    model, (x, y) = toy.model(), toy.data(3)
    slots, crosses = ["solver/0", "judge/0", "judge/0"], []
    for verified in (False, True):
        with probes.attach(model, toy.slots) as scope:
            toy.run(scope, model, slots, problems=["p", "q", "r"])
            if verified:

                def loss_of_rows(mask):
                    with scope.rows(slots, problems=["x", "y", "z"]):
                        losses = ((model(x) - y) ** 2).squeeze(1)
                    return (losses * mask).sum()

                scope.verify(loss_of_rows, slots)
            toy.run(scope, model, slots, problems=["s", "q", "p"])
            crosses.append(scope.step(toy.sgd(model)).gram_cross)
            model.zero_grad()
    np.testing.assert_array_equal(crosses[0], crosses[1])
