"""What `attach`, `rows` and `step` refuse, and in which words."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.errors import ProbeError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": {}}, "slots is empty"),
        ({"slots": ["solver/0", "judge/0"]}, "slots is a list; give a mapping slot -> role"),
        ({"mode": "fast"}, "unknown mode 'fast'. Did you mean 'auto'? Allowed: auto, observe, fused, pure"),
        ({"policies": {"judg": "default"}}, "neither a role nor a slot. Did you mean 'judge'"),
        ({"policies": {"judge": "default"}}, "slot 'solver/0' has no policy"),
        ({"policies": {"judge": "a", "solver": "b"}}, "names 2 policies"),
    ],
)
def test_attach_refuses(toy, arguments, message):
    with pytest.raises(ProbeError, match=re.escape(message)):
        probes.attach(toy.model(), **({"slots": toy.slots} | arguments))


def test_attach_refuses_models_it_cannot_measure(toy, nano):
    frozen = toy.model().requires_grad_(False)
    with pytest.raises(ProbeError, match="has no trainable parameters"):
        probes.attach(frozen, toy.slots)
    with pytest.raises(ProbeError, match="none of the 1 trainable parameters of Scale can be covered"):
        probes.attach(toy.unknown_layer(), toy.slots, mode="observe")
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


def test_a_parameter_that_was_replaced_since_is_named(nano):
    model, batch = nano.model(tie_word_embeddings=False), nano.batch(["generator/0", "aggregator/0"])
    scope = probes.attach(model, nano.slots)
    model.resize_token_embeddings(23, mean_resizing=False)
    message = r"'model\.embed_tokens\.weight' was replaced: 19 x 16 -> 23 x 16 since attach\(\)"
    with pytest.raises(ProbeError, match=message), scope.rows(batch.slots):
        pass
    scope.detach()


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
def test_rows_refuses(toy, slots, details, message):
    with (
        probes.attach(toy.model(), toy.slots) as scope,
        pytest.raises(ProbeError, match=message),
        scope.rows(slots, **details),
    ):
        pass


def test_rows_refuses_a_block_within_a_block(toy):
    with (
        probes.attach(toy.model(), toy.slots) as scope,
        scope.rows(["solver/0"]),
        pytest.raises(ProbeError, match="already inside"),
        scope.rows(["solver/0"]),
    ):
        pass


def test_a_failure_never_raises_inside_backward_and_detaches_at_step(toy):
    model = toy.model()
    scope = probes.attach(model, toy.slots)
    x, y = toy.data(4)
    with scope.rows(["solver/0"] * 3):
        loss = ((model(x) - y) ** 2).sum()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ProbeError, match=r"the input has shape \[4, 8\], but 3 rows were announced"):
        scope.step(toy.sgd(model))
    assert not scope.attached
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    toy.sgd(model).step()


def test_step_without_rows_is_refused_and_the_scope_lives_on(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        with pytest.raises(ProbeError, match="no rows of policy default since its last step"):
            scope.step(toy.sgd(model))
        assert scope.attached
        toy.run(scope, model, ["solver/0"])
        with pytest.raises(ProbeError, match="holds no parameter of the policies default"):
            scope.step(toy.sgd(toy.model()))
        scope.step(toy.sgd(model))


def stale_gradients(toy, scope, model):
    toy.run(scope, model, ["solver/0", "judge/0"])
    scope.step(toy.sgd(model))
    toy.run(scope, model, ["solver/0", "judge/0"])


def forward_outside_rows(toy, scope, model):
    toy.run(scope, model, ["solver/0"])
    model(toy.data()[0]).sum().backward()


def clipped_before(toy, scope, model):
    toy.run(scope, model, ["solver/0"])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zeroed_before(toy, scope, model):
    toy.run(scope, model, ["solver/0"])
    model.zero_grad()


def weights_used_by_hand(toy, scope, model):
    toy.run(scope, model, ["solver/0"])
    (model[0].weight ** 2).sum().backward()


@pytest.mark.parametrize(
    "mistake", [stale_gradients, forward_outside_rows, clipped_before, zeroed_before, weights_used_by_hand]
)
def test_sums_that_miss_autograds_gradient_are_refused(toy, mistake):
    model = toy.model()
    scope = probes.attach(model, toy.slots)
    mistake(toy, scope, model)
    with pytest.raises(ProbeError, match=r"the slot gradients miss autograd's gradient by .* most at '\d"):
        scope.step(toy.sgd(model))
    assert not scope.attached


def test_a_covered_parameter_that_no_tap_saw_is_named(toy):
    model = toy.model()
    scope = probes.attach(model, toy.slots)
    x, y = toy.data()
    with scope.rows(["solver/0"] * 6):
        hidden = nn.functional.linear(x, model[0].weight, model[0].bias)
        ((model[3](model[2](hidden)) - y) ** 2).sum().backward()
    with pytest.raises(ProbeError, match=r"2 of 6 covered parameters .* no tap saw, for instance '0.weight'"):
        scope.step(toy.sgd(model))


def test_backward_that_was_forgotten_is_refused(toy):
    model = toy.model()
    scope = probes.attach(model, toy.slots)
    with scope.rows(["solver/0"] * 6):
        model(toy.data()[0])
    with pytest.raises(ProbeError, match="no gradient reached its parameters"):
        scope.step(toy.sgd(model))


class ForeignCheckpoint(torch.autograd.Function):
    """Runs a layer again in the backward, as checkpointing does that is not torch's."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(dy)
        return x.grad, None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("observe", r"reentrant activation checkpointing.*use_reentrant=False"),
        ("pure", "ran inside a backward pass"),
    ],
)
def test_foreign_checkpointing_that_hides_the_rows_is_refused(toy, mode, message):
    model = toy.model()
    scope = probes.attach(model, toy.slots, mode=mode)
    with scope.rows(["solver/0"] * 6):
        loss = ForeignCheckpoint.apply(toy.data()[0].requires_grad_(), model).sum()
    loss.backward()
    with pytest.raises(ProbeError, match=message):
        scope.step(toy.sgd(model))


def test_rows_that_reach_the_wrong_adapter_are_refused(toy, nano):
    model, batch = nano.lora(adapters=("one", "two")), nano.batch(["generator/0", "aggregator/0"])
    scope = probes.attach(model, nano.slots, {"generator": "one", "aggregator": "two"})
    with scope.rows(batch.slots):
        loss = nano.loss(model, batch)
    loss.backward()
    with pytest.raises(ProbeError, match=r"rows of aggregator/0 went through the parameters of policy 'one'"):
        scope.step(toy.sgd(model))


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


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    with pytest.raises(ProbeError, match=r"'0' \(Embedding\) has sparse gradients.*set sparse=False"):
        probes.attach(model, {"a": "a"})
    model[0].requires_grad_(False)
    probes.attach(model, {"a": "a"}).detach()


@pytest.mark.parametrize("affine", [True, False])
def test_batch_statistics_mix_slots_and_are_refused(affine):
    norm = torch.nn.BatchNorm1d(4, affine=affine)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), norm, torch.nn.Linear(4, 1))
    with pytest.raises(ProbeError, match=r"'1' \(BatchNorm1d\) normalises over the rows of all slots"):
        probes.attach(model, {"generator/0": "generator"})
    norm.eval()
    if affine:
        norm.requires_grad_(False)
    probes.attach(model, {"generator/0": "generator"}).detach()
