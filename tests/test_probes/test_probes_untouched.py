"""A run with probes is bitwise the run without: gradients, weights, random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradscope import probes

UNEVEN = (3, 2, 4, 1)


def kinds(nano, dtype):
    return {
        "lora": lambda: nano.lora(dtype=dtype, lora_dropout=0.2).train(),
        "full": lambda: nano.model(dtype=dtype, attention_bias=True).train(),
    }


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_gradients_are_bitwise_equal(nano, kind):
    batches = [nano.shuffled(UNEVEN, seed=seed) for seed in range(2)]

    def gradients(probed):
        model = kinds(nano, torch.float32)[kind]()
        scope = probes.attach(model, nano.slots) if probed else None
        torch.manual_seed(5)
        for batch in batches:
            if scope is None:
                nano.loss(model, batch).backward()
            else:
                with scope.rows(batch.slots):
                    loss = nano.loss(model, batch)
                loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad], torch.rand(3)

    (plain, plain_random), (probed, probed_random) = gradients(False), gradients(True)
    assert len(plain) == len(probed) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    assert torch.equal(plain_random, probed_random)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_after_twenty_steps_are_bitwise_equal(nano, kind):
    def train(probed):
        model = kinds(nano, torch.float32)[kind]()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scope = probes.attach(model, nano.slots) if probed else None
        torch.manual_seed(6)
        grams = []
        for step in range(20):
            batch = nano.shuffled(UNEVEN, seed=step)
            if scope is None:
                nano.loss(model, batch).backward()
            else:
                with scope.rows(batch.slots):
                    nano.loss(model, batch).backward()
                grams.append(scope.step(optimizer).gram)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), grams

    (plain, _), (probed, grams) = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    assert len(grams) == 20
    assert (grams[0] != grams[-1]).any()


def test_detach_leaves_the_model_as_it_was(nano):
    model = nano.lora()
    nano.checkpoint(model, reentrant=False)
    batch = nano.batch(["generator/0", "aggregator/0"])
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    functions = [layer._gradient_checkpointing_func for layer in layers]
    hooks = [list(module._forward_hooks.items()) for module in model.modules()]
    before = nano.row_losses(model, batch)
    scope = probes.attach(model, nano.slots)
    assert [list(module._forward_hooks.items()) for module in model.modules()] != hooks
    assert torch.equal(nano.row_losses(model, batch), before)
    scope.detach()
    scope.detach()
    assert not scope.attached
    assert [list(module._forward_hooks.items()) for module in model.modules()] == hooks
    assert not any(module._forward_hooks_with_kwargs for module in model.modules())
    assert [layer._gradient_checkpointing_func for layer in layers] == functions
    after = nano.row_losses(model, batch)
    assert torch.equal(after, before)
    assert type(after.grad_fn) is type(before.grad_fn)
    with pytest.raises(probes.ProbeError, match="the scope is detached"), scope.rows(batch.slots):
        pass
    probes.attach(model, nano.slots).detach()


def test_in_place_operations_after_a_tapped_layer_still_work():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with probes.attach(model, {"a": "a", "b": "b"}) as scope:
        with scope.rows(list("aabbab")):
            model(x).sum().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
        assert scope.step(torch.optim.SGD(model.parameters())).gram.shape == (2, 2)


def test_forward_passes_without_gradients_are_not_touched(nano):
    model, batch = nano.lora(), nano.batch(["generator/0", "aggregator/0"])
    with probes.attach(model, nano.slots) as scope, torch.no_grad(), scope.rows(batch.slots):
        assert nano.loss(model, batch).grad_fn is None


def test_a_second_backward_of_the_same_graph_adds_up(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        loss.backward(retain_graph=True)
        once = scope.slot_gradients("generator/2")
        loss.backward()
        twice = scope.slot_gradients("generator/2")
        assert scope.step(torch.optim.SGD(model.parameters())).gram.shape == (4, 4)
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=1e-14, atol=0)
