"""A run with probes is bitwise the run without: gradients, weights, random numbers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from gradscope import probes

UNEVEN = (3, 2, 4, 1)
KINDS = ("lora", "lora on embeddings", "lora with bias", "full")


def kinds(nano, dtype):
    return {
        "lora": lambda: nano.lora(dtype=dtype, lora_dropout=0.2).train(),
        "lora on embeddings": lambda: nano.lora(
            dtype=dtype,
            lora_dropout=0.1,
            model=nano.model(dtype=dtype, tie_word_embeddings=False),
            target_modules=["embed_tokens", "q_proj", "lm_head"],
        ).train(),
        "lora with bias": lambda: nano.lora(
            dtype=dtype,
            model=nano.model(dtype=dtype, attention_bias=True),
            target_modules=["q_proj", "o_proj"],
            lora_bias=True,
        ).train(),
        "full": lambda: nano.model(dtype=dtype, attention_bias=True).train(),
    }


@pytest.mark.parametrize("kind", KINDS)
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
    assert len(plain) == len(probed) >= 8
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    assert torch.equal(plain_random, probed_random)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_after_fifty_steps_are_bitwise_equal(nano, kind):
    def train(probed):
        model = kinds(nano, torch.float32)[kind]()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scope = probes.attach(model, nano.slots) if probed else None
        torch.manual_seed(6)
        grams = []
        for step in range(50):
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
    assert len(grams) == 50
    assert (grams[0] != grams[-1]).any()


def state_of(model):
    """All that a model holds: the attributes of every module, hooks included, and of every parameter."""
    modules = {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    hooks = {name: dict(p._backward_hooks or {}) for name, p in model.named_parameters()}
    return modules, hooks, vars(CheckpointFunction)["forward"], vars(CheckpointFunction)["backward"]


@pytest.mark.parametrize("mode", ["auto", "observe", "pure", "fused"])
@pytest.mark.parametrize("leaving", ["detach", "failure"])
def test_detach_leaves_the_model_as_it_was(nano, mode, leaving):
    model = nano.lora(target_modules=["q_proj", "down_proj"])
    nano.checkpoint(model, reentrant=False)
    batch = nano.batch(["generator/0", "generator/0"])
    before, losses = state_of(model), nano.row_losses(model, batch)
    scope = probes.attach(model, nano.slots, mode=mode)
    assert state_of(model) != before
    assert torch.allclose(nano.row_losses(model, batch), losses, rtol=1e-12)
    with scope.rows(batch.slots):
        nano.loss(model, batch).backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    if leaving == "detach":
        scope.step(optimizer)
        scope.detach()
        scope.detach()
    else:
        model.zero_grad()
        with pytest.raises(probes.ProbeError):
            scope.step(optimizer)
    assert not scope.attached
    after = state_of(model)
    assert after[0].keys() == before[0].keys()
    for name, attributes in before[0].items():
        assert after[0][name] == attributes, name
    assert after[1:] == before[1:]
    again = nano.row_losses(model, batch)
    assert torch.equal(again, losses)
    assert type(again.grad_fn) is type(losses.grad_fn)
    with pytest.raises(probes.ProbeError, match="the scope is detached"), scope.rows(batch.slots):
        pass
    probes.attach(model, nano.slots).detach()


def test_two_scopes_may_leave_in_any_order(toy):
    """torch's checkpoint function is one for the whole process."""
    gc.collect()  # scopes of other tests that went with their models
    probes.attach(toy.model(), toy.slots).detach()
    original = vars(CheckpointFunction)["backward"]
    assert original.__func__.__module__ == "torch.utils.checkpoint"
    first, second = (probes.attach(toy.model(), toy.slots) for _ in range(2))
    first.detach()
    assert vars(CheckpointFunction)["backward"] is not original
    second.detach()
    assert vars(CheckpointFunction)["backward"] is original


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
