"""What a scope records, in anyone's loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradscope import probes


def test_plain_pytorch_loop(toy):
    model, (x, y) = toy.model(), toy.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slots = ["solver/0", "judge/0", "solver/0", "solver/0", "judge/0", "judge/0"]
    scope = probes.attach(model, toy.slots)
    for _ in range(3):
        expected = []
        for slot in toy.slots:
            rows = [row for row, name in enumerate(slots) if name == slot]
            loss = ((model(x[rows]) - y[rows]) ** 2).sum()
            expected.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())]))
        with scope.rows(slots):
            loss = ((model(x) - y) ** 2).sum()
        loss.backward()
        record = scope.step(optimizer)
        truth = torch.stack(expected)
        np.testing.assert_allclose(record.gram, (truth @ truth.T).numpy(), rtol=1e-12)
        total = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
        assert record.scalars["grad_norm"] == pytest.approx(total, rel=1e-12)
        assert record.scalars["learning_rate"] == 1e-2
        optimizer.step()
        optimizer.zero_grad()
    scope.detach()
    assert record.policy == "default"
    assert record.slots == tuple(toy.slots)
    assert record.coverage == ()
    assert record.gram_cross is record.label_gram is None
    assert record.attribution_residual <= 1e-12


def test_slots_without_rows_are_nan_and_slots_without_gradient_are_zero(toy):
    model = toy.model()
    slots = {"a": "a", "b": "b", "c": "c"}
    with probes.attach(model, slots) as scope:
        x, y = toy.data(4)
        with scope.rows(["a", "a", "b", "b"]):
            losses = ((model(x) - y) ** 2).squeeze(1)
        (losses * torch.tensor([1.0, 1.0, 0.0, 0.0])).sum().backward()
        gram = scope.step(toy.sgd(model)).gram
    assert gram[0, 0] > 0
    assert gram[1, 1] == gram[0, 1] == 0.0
    assert np.isnan(gram[2]).all()
    assert np.isnan(gram[:, 2]).all()


def test_rows_spared_their_forward_pass_have_zero_gradient(toy):
    model = toy.model()
    optimizer = toy.sgd(model)
    with probes.attach(model, toy.slots) as scope:
        with scope.rows(["judge/0"] * 2, advantages=[0.0, 0.0]):
            pass
        quiet = scope.step(optimizer)
        assert quiet.gram[1, 1] == 0.0
        assert math.isnan(quiet.gram[0, 0])
        assert quiet.scalars["grad_norm"] == 0.0
        with scope.rows(["judge/0"] * 2):
            pass
        toy.run(scope, model, ["solver/0"] * 3)
        record = scope.step(optimizer)
    assert record.gram[1, 1] == 0.0
    assert record.gram[0, 0] > 0
    assert record.counts["num_rows"].tolist() == [3, 2]


def test_counts_sum_over_micro_batches(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        toy.run(
            scope, model, ["solver/0", "judge/0", "solver/0"],
            tokens=[5, 7, 1], advantages=[0.5, -2.0, 0.0], loss_weights=[0.1, 0.2, 0.3],
        )  # fmt: skip
        toy.run(scope, model, ["solver/0"], tokens=[4], advantages=[-1.5])
        counts = scope.step(toy.sgd(model)).counts
    assert counts["num_rows"].tolist() == [3, 1]
    assert counts["num_tokens"].tolist() == [10, 7]
    assert counts["num_signal_rows"].tolist() == [2, 1]
    assert counts["advantage_abs_sum"].tolist() == [2.0, 2.0]
    np.testing.assert_equal(counts["loss_weight"], [np.nan, 0.2])


def test_a_micro_batch_whose_forward_failed_is_not_counted(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        with pytest.raises(MemoryError), scope.rows(["judge/0"]):
            raise MemoryError
        toy.run(scope, model, ["solver/0"])
        before = scope.backward_seconds
        record = scope.step(toy.sgd(model))
    assert record.counts["num_rows"].tolist() == [1, 0]
    assert before > 0


def test_each_update_starts_from_nothing(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        grams = []
        for _ in range(2):
            toy.run(scope, model, ["solver/0", "judge/0"])
            grams.append(scope.step(toy.sgd(model)).gram)
            model.zero_grad()
    np.testing.assert_array_equal(grams[0], grams[1])


def test_numbers_that_cancel_are_not_taken_for_a_failure(toy):
    model = toy.model().float()
    x = toy.data(2)[0].float()[[0, 0, 0, 0]]
    with probes.attach(model, toy.slots) as scope:
        for weights in ([1.0, 2.0, 3.0, 4.0], [1.1, -1.1, 0.7, -0.7]):
            with scope.rows(["solver/0", "solver/0", "judge/0", "judge/0"]):
                loss = (model(x).squeeze(1) * torch.tensor(weights)).sum()
            loss.backward()
            assert scope.step(toy.sgd(model)).gram.shape == (2, 2)
            model.zero_grad()


def test_a_gradient_that_is_not_finite_is_recorded_as_it_is(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        x, _ = toy.data(2)
        with scope.rows(["solver/0", "judge/0"]):
            loss = (model(x).squeeze(1) * torch.tensor([1.0, math.inf])).sum()
        loss.backward()
        record = scope.step(toy.sgd(model))
        assert scope.attached
    assert record.gram[0, 0] > 0
    assert not math.isfinite(record.gram[1, 1])
    assert not math.isfinite(record.scalars["grad_norm"])
    assert math.isnan(scope.residuals["default"])


def test_uncovered_parameters_are_listed_and_warned_of_once(toy):
    model = toy.model()
    model[1] = toy.unknown_layer()
    with pytest.warns(
        UserWarning, match=r"1 trainable parameters are covered only in updates.*'1.factor'"
    ) as caught:
        scope = probes.attach(model, toy.slots)
    toy.run(scope, model, ["solver/0", "judge/0"])
    record = scope.step(toy.sgd(model))
    scope.detach()
    assert len(caught) == 1
    assert record.coverage == ("1.factor",) == tuple(scope.coverage)
    assert "Scale" in scope.coverage["1.factor"]
    total = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    assert record.scalars["grad_norm"] == pytest.approx(total, rel=1e-12)


def test_dora_magnitudes_are_uncovered_and_the_rest_is_measured(toy, nano):
    model = nano.lora(use_dora=True, target_modules=["q_proj", "down_proj"])
    batch = nano.shuffled((3, 2, 4, 1))
    expected = nano.separate(model, [batch])
    with pytest.warns(UserWarning, match="4 trainable parameters are covered only in"):
        scope = probes.attach(model, nano.slots)
    assert all("lora_magnitude_vector" in name for name in scope.coverage)
    magnitudes = set(scope.coverage)
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
    record = scope.step(toy.sgd(model))
    scope.detach()
    assert record.coverage == tuple(scope.coverage)
    for slot, parts in found.items():
        parts = {name: part for name, part in parts.items() if name not in magnitudes}
        own = {name: expected[slot][name] for name in parts}
        assert nano.gradient_error({slot: parts}, {slot: own}) <= 1e-12
