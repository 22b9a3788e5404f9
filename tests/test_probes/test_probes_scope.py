"""What a scope records, in anyone's loop, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.errors import ProbeError

PAIR = {"solver/0": "solver", "judge/0": "judge"}


def mlp(**_):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()


def data(rows=6):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, 3, generator=generator, dtype=torch.float64),
        torch.randn(rows, 1, generator=generator, dtype=torch.float64),
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def run(scope, model, slots, **details):
    x, y = data(len(slots))
    with scope.rows(slots, **details):
        loss = ((model(x) - y) ** 2).sum()
    loss.backward()
    return loss


def test_plain_pytorch_loop():
    model, (x, y) = mlp(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slots = ["solver/0", "judge/0", "solver/0", "solver/0", "judge/0", "judge/0"]
    scope = probes.attach(model, PAIR)
    for _ in range(3):
        expected = []
        for slot in PAIR:
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
    assert record.slots == tuple(PAIR)
    assert record.coverage == ()
    assert record.gram_cross is record.update_gram is record.effect is record.attribution_residual is None


def test_slots_without_rows_are_nan_and_slots_without_gradient_are_zero():
    model = mlp()
    slots = {"a": "a", "b": "b", "c": "c"}
    with probes.attach(model, slots) as scope:
        x, y = data(4)
        with scope.rows(["a", "a", "b", "b"]):
            losses = ((model(x) - y) ** 2).squeeze(1)
        (losses * torch.tensor([1.0, 1.0, 0.0, 0.0])).sum().backward()
        gram = scope.step(sgd(model)).gram
    assert gram[0, 0] > 0
    assert gram[1, 1] == gram[0, 1] == 0.0
    assert np.isnan(gram[2]).all()
    assert np.isnan(gram[:, 2]).all()


def test_rows_spared_their_forward_pass_have_zero_gradient():
    model = mlp()
    optimizer = sgd(model)
    with probes.attach(model, PAIR) as scope:
        with scope.rows(["judge/0"] * 2, advantages=[0.0, 0.0]):
            pass
        quiet = scope.step(optimizer)
        assert quiet.gram[1, 1] == 0.0
        assert math.isnan(quiet.gram[0, 0])
        assert quiet.scalars["grad_norm"] == 0.0
        with scope.rows(["judge/0"] * 2):
            pass
        run(scope, model, ["solver/0"] * 3)
        record = scope.step(optimizer)
    assert record.gram[1, 1] == 0.0
    assert record.gram[0, 0] > 0
    assert record.counts["num_rows"].tolist() == [3, 2]


def test_counts_sum_over_micro_batches():
    model = mlp()
    with probes.attach(model, PAIR) as scope:
        run(
            scope, model, ["solver/0", "judge/0", "solver/0"],
            tokens=[5, 7, 1], advantages=[0.5, -2.0, 0.0], loss_weights=[0.1, 0.2, 0.3],
        )  # fmt: skip
        run(scope, model, ["solver/0"], tokens=[4], advantages=[-1.5])
        counts = scope.step(sgd(model)).counts
    assert counts["num_rows"].tolist() == [3, 1]
    assert counts["num_tokens"].tolist() == [10, 7]
    assert counts["num_signal_rows"].tolist() == [2, 1]
    assert counts["advantage_abs_sum"].tolist() == [2.0, 2.0]
    np.testing.assert_equal(counts["loss_weight"], [np.nan, 0.2])


def test_a_micro_batch_whose_forward_failed_is_not_counted():
    model = mlp()
    with probes.attach(model, PAIR) as scope:
        with pytest.raises(MemoryError), scope.rows(["judge/0"]):
            raise MemoryError
        run(scope, model, ["solver/0"])
        before = scope.backward_seconds
        record = scope.step(sgd(model))
    assert record.counts["num_rows"].tolist() == [1, 0]
    assert before > 0


def test_each_update_starts_from_nothing():
    model = mlp()
    with probes.attach(model, PAIR) as scope:
        grams = []
        for _ in range(2):
            run(scope, model, ["solver/0", "judge/0"])
            grams.append(scope.step(sgd(model)).gram)
            model.zero_grad()
    np.testing.assert_array_equal(grams[0], grams[1])


def test_numbers_that_cancel_are_not_taken_for_a_failure():
    model = mlp().float()
    x = data(2)[0].float()[[0, 0, 0, 0]]
    with probes.attach(model, PAIR) as scope:
        for weights in ([1.0, 2.0, 3.0, 4.0], [1.1, -1.1, 0.7, -0.7]):
            with scope.rows(["solver/0", "solver/0", "judge/0", "judge/0"]):
                loss = (model(x).squeeze(1) * torch.tensor(weights)).sum()
            loss.backward()
            assert scope.step(sgd(model)).gram.shape == (2, 2)
            model.zero_grad()


def test_a_gradient_that_is_not_finite_is_recorded_as_it_is():
    model = mlp()
    with probes.attach(model, PAIR) as scope:
        x, _ = data(2)
        with scope.rows(["solver/0", "judge/0"]):
            loss = (model(x).squeeze(1) * torch.tensor([1.0, math.inf])).sum()
        loss.backward()
        record = scope.step(sgd(model))
        assert scope.attached
    assert record.gram[0, 0] > 0
    assert not math.isfinite(record.gram[1, 1])
    assert not math.isfinite(record.scalars["grad_norm"])
    assert math.isnan(scope.residuals["default"])


class Scale(nn.Module):
    """A layer of a kind that row segmentation does not know."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


def test_uncovered_parameters_are_listed_and_warned_of_once():
    model = mlp()
    model[1] = Scale()
    with pytest.warns(UserWarning, match=r"1 trainable parameters are not covered.*'1.factor'") as caught:
        scope = probes.attach(model, PAIR)
    run(scope, model, ["solver/0", "judge/0"])
    record = scope.step(sgd(model))
    scope.detach()
    assert len(caught) == 1
    assert record.coverage == ("1.factor",) == tuple(scope.coverage)
    assert "Scale" in scope.coverage["1.factor"]
    total = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    assert record.scalars["grad_norm"] == pytest.approx(total, rel=1e-12)


def test_dora_magnitudes_are_uncovered_and_the_rest_is_measured(nano):
    model = nano.lora(use_dora=True, target_modules=["q_proj", "down_proj"])
    batch = nano.shuffled((3, 2, 4, 1))
    expected = nano.separate(model, [batch])
    with pytest.warns(UserWarning, match="4 trainable parameters are not covered"):
        scope = probes.attach(model, nano.slots)
    assert all("lora_magnitude_vector" in name for name in scope.coverage)
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
    record = scope.step(sgd(model))
    scope.detach()
    assert record.coverage == tuple(scope.coverage)
    for slot, parts in found.items():
        own = {name: expected[slot][name] for name in parts}
        assert nano.gradient_error({slot: parts}, {slot: own}) <= 1e-12


def test_lora_on_embeddings_is_uncovered_and_the_rest_is_measured(nano):
    untied = nano.model(tie_word_embeddings=False)
    model = nano.lora(model=untied, target_modules=["embed_tokens", "q_proj"])
    batch = nano.shuffled((3, 2, 4, 1))
    expected = nano.separate(model, [batch])
    with pytest.warns(UserWarning, match="2 trainable parameters are not covered"):
        scope = probes.attach(model, nano.slots)
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
    record = scope.step(sgd(model))
    scope.detach()
    assert len(record.coverage) == 2
    assert all("lora_embedding" in name for name in record.coverage)
    covered = {slot: {name: parts[name] for name in found[slot]} for slot, parts in expected.items()}
    assert nano.gradient_error(found, covered) <= 1e-12
    assert nano.gram_error(record.gram, nano.gram(covered)) <= 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": {}}, "slots is empty"),
        ({"mode": "fast"}, "unknown mode 'fast'. Allowed: auto, observe"),
        ({"policies": {"judg": "default"}}, "neither a role nor a slot. Did you mean 'judge'"),
        ({"policies": {"judge": "default"}}, "slot 'solver/0' has no policy"),
        ({"policies": {"judge": "a", "solver": "b"}}, "names 2 policies"),
    ],
)
def test_attach_refuses(arguments, message):
    with pytest.raises(ProbeError, match=message.replace(".", r"\.")):
        probes.attach(mlp(), **({"slots": PAIR} | arguments))


def test_attach_refuses_models_it_cannot_measure(nano):
    frozen = mlp().requires_grad_(False)
    with pytest.raises(ProbeError, match="has no trainable parameters"):
        probes.attach(frozen, PAIR)
    with pytest.raises(ProbeError, match="none of the 1 trainable parameters of Scale can be covered"):
        probes.attach(Scale(), PAIR)
    model = nano.lora(adapters=("one", "two"))
    with pytest.raises(
        ProbeError, match=r"unknown policy 'tow'\. Did you mean 'two'.*Adapters of the model: one, two"
    ):
        probes.attach(model, nano.slots, {"generator": "one", "aggregator": "tow"})
    first = probes.attach(model, nano.slots)
    with pytest.raises(ProbeError, match=r"is probed already.*call detach\(\)"):
        probes.attach(model, nano.slots)
    with pytest.raises(ProbeError, match="is probed already"):
        probes.attach(model.base_model.model.model.layers, nano.slots)
    first.detach()


@pytest.mark.parametrize(
    ("slots", "details", "message"),
    [
        (["solver/1"], {}, r"unknown slot 'solver/1'\. Did you mean 'solver/0'\? Allowed: solver/0, judge/0"),
        ([], {}, "got no rows"),
        ("solver/0", {}, "single string"),
        (["solver/0"], {"tokens": [1, 2]}, "tokens has 2 entries, slot_of_each_row has 1"),
        (["solver/0"], {"problems": []}, "problems has 0 entries"),
    ],
)
def test_rows_refuses(slots, details, message):
    with (
        probes.attach(mlp(), PAIR) as scope,
        pytest.raises(ProbeError, match=message),
        scope.rows(slots, **details),
    ):
        pass


def test_rows_refuses_a_block_within_a_block():
    with (
        probes.attach(mlp(), PAIR) as scope,
        scope.rows(["solver/0"]),
        pytest.raises(ProbeError, match="already inside"),
        scope.rows(["solver/0"]),
    ):
        pass


def test_a_failure_never_raises_inside_backward_and_detaches_at_step():
    model = mlp()
    scope = probes.attach(model, PAIR)
    x, y = data(4)
    with scope.rows(["solver/0"] * 3):
        loss = ((model(x) - y) ** 2).sum()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ProbeError, match=r"the input has shape \[4, 8\], but 3 rows were announced"):
        scope.step(sgd(model))
    assert not scope.attached
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    sgd(model).step()


def test_step_without_rows_is_refused_and_the_scope_lives_on():
    model = mlp()
    with probes.attach(model, PAIR) as scope:
        with pytest.raises(ProbeError, match="no rows of policy default since its last step"):
            scope.step(sgd(model))
        assert scope.attached
        run(scope, model, ["solver/0"])
        with pytest.raises(ProbeError, match="holds no parameter of the policies default"):
            scope.step(sgd(mlp()))
        scope.step(sgd(model))


def stale_gradients(scope, model):
    run(scope, model, ["solver/0", "judge/0"])
    scope.step(sgd(model))
    run(scope, model, ["solver/0", "judge/0"])


def forward_outside_rows(scope, model):
    run(scope, model, ["solver/0"])
    model(data()[0]).sum().backward()


def clipped_before(scope, model):
    run(scope, model, ["solver/0"])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zeroed_before(scope, model):
    run(scope, model, ["solver/0"])
    model.zero_grad()


def weights_used_by_hand(scope, model):
    run(scope, model, ["solver/0"])
    (model[0].weight ** 2).sum().backward()


@pytest.mark.parametrize(
    "mistake", [stale_gradients, forward_outside_rows, clipped_before, zeroed_before, weights_used_by_hand]
)
def test_sums_that_miss_autograds_gradient_are_refused(mistake):
    model = mlp()
    scope = probes.attach(model, PAIR)
    mistake(scope, model)
    with pytest.raises(ProbeError, match=r"the slot gradients miss autograd's gradient by .* most at '\d"):
        scope.step(sgd(model))
    assert not scope.attached


def test_a_covered_parameter_that_no_tap_saw_is_named():
    model = mlp()
    scope = probes.attach(model, PAIR)
    x, y = data()
    with scope.rows(["solver/0"] * 6):
        hidden = nn.functional.linear(x, model[0].weight, model[0].bias)
        ((model[3](model[2](hidden)) - y) ** 2).sum().backward()
    with pytest.raises(ProbeError, match=r"2 of 6 covered parameters .* no tap saw, for instance '0.weight'"):
        scope.step(sgd(model))


def test_backward_that_was_forgotten_is_refused():
    model = mlp()
    scope = probes.attach(model, PAIR)
    with scope.rows(["solver/0"] * 6):
        model(data()[0])
    with pytest.raises(ProbeError, match="no gradient reached its parameters"):
        scope.step(sgd(model))


def test_reentrant_checkpointing_that_hides_the_rows_is_refused(nano):
    model, batch = nano.lora(), nano.shuffled((1, 1, 1, 1))
    scope = probes.attach(model, nano.slots)
    nano.checkpoint(model, reentrant=True)  # after attach(), so its second forward is not known
    model.enable_input_require_grads()
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    with pytest.raises(ProbeError, match=r"reentrant activation checkpointing.*use_reentrant=False"):
        scope.step(sgd(model))


def test_rows_that_reach_the_wrong_adapter_are_refused(nano):
    model, batch = nano.lora(adapters=("one", "two")), nano.batch(["generator/0", "aggregator/0"])
    scope = probes.attach(model, nano.slots, {"generator": "one", "aggregator": "two"})
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    with pytest.raises(ProbeError, match=r"rows of aggregator/0 went through the parameters of policy 'one'"):
        scope.step(sgd(model))


def test_a_policy_with_gradients_but_no_rows_is_refused(nano):
    model, batch = nano.lora(adapters=("one", "two")), nano.batch(["generator/0", "generator/1"])
    scope = probes.attach(model, nano.slots, {"generator": "one", "aggregator": "two"})
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    model.set_adapter("two")
    nano.loss(model, batch).backward()
    everything = torch.optim.SGD([p for p in model.parameters() if p.grad is not None], lr=0.1)
    with pytest.raises(ProbeError, match="policy 'two' has gradients but no rows"):
        scope.step(everything)
