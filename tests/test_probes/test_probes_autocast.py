"""Reduced precision: autocast, coarse models, gradient scaling, against separate backwards of one type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope import probes

UNEVEN = (3, 2, 4, 1)
COARSE = 3e-3
"""Largest error of G_kl / (n_k n_l): autograd rounds weight gradients to the coarse type, probes do not."""


def kinds(nano):
    untied = {"tie_word_embeddings": False}
    return {
        "lora": lambda dtype: nano.lora(dtype=dtype),
        "lora on embeddings": lambda dtype: nano.lora(
            dtype=dtype,
            model=nano.model(dtype=dtype, **untied),
            target_modules=["embed_tokens", "q_proj", "lm_head"],
        ),
        "dora": lambda dtype: nano.lora(dtype=dtype, use_dora=True, target_modules=["q_proj", "down_proj"]),
        "full": lambda dtype: nano.model(dtype=dtype, attention_bias=True),
    }


def losses_under(nano, model, autocast):
    def loss(batch):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return nano.loss(model, batch)

    return loss


CASES = [
    (torch.float32, None, 1e-5),
    (torch.float32, torch.bfloat16, COARSE),
    (torch.float32, torch.float16, COARSE),
    (torch.bfloat16, None, COARSE),
]


@pytest.mark.parametrize(("dtype", "autocast", "tolerance"), CASES)
@pytest.mark.parametrize("kind", ["lora", "lora on embeddings", "dora", "full"])
def test_gram_against_separate_backwards(nano, kind, dtype, autocast, tolerance):
    model, batch = kinds(nano)[kind](dtype), nano.shuffled(UNEVEN)
    loss = losses_under(nano, model, autocast)
    pure = kind == "dora"
    expected = nano.gram(nano.separate(model, [batch], loss))
    with probes.attach(model, nano.slots, mode="pure" if pure else "observe") as scope:
        for part in [batch.of(slot) for slot in nano.slots] if pure else [batch]:
            with scope.rows(part.slots):
                total = loss(part)
            total.backward()
        record = scope.step(torch.optim.SGD(model.parameters()))
    assert record.coverage == ()
    assert record.gram.dtype == np.float64
    assert nano.gram_error(record.gram, expected) <= tolerance


@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_under_checkpointing(nano, reentrant):
    model, batch = nano.lora(dtype=torch.float32), nano.shuffled(UNEVEN)
    loss = losses_under(nano, model, torch.bfloat16)
    expected = nano.gram(nano.separate(model, [batch], loss))
    nano.checkpoint(model, reentrant=reentrant)
    model.enable_input_require_grads()
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(batch.slots):
            total = loss(batch)
        total.backward()
        record = scope.step(torch.optim.SGD(model.parameters()))
    assert nano.gram_error(record.gram, expected) <= COARSE


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_bitwise_equal(nano, autocast):
    batch = nano.shuffled(UNEVEN)

    def gradients(probed):
        model = nano.lora(dtype=torch.float32)
        loss = losses_under(nano, model, autocast)
        if not probed:
            loss(batch).backward()
        else:
            scope = probes.attach(model, nano.slots)
            with scope.rows(batch.slots):
                loss(batch).backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


@pytest.mark.parametrize("mode", ["observe", "pure"])
def test_a_gradient_scaler_is_divided_out_once(nano, mode):
    model, batch = nano.lora(dtype=torch.float32), nano.shuffled(UNEVEN)
    loss = losses_under(nano, model, torch.float16)
    expected = nano.gram(nano.separate(model, [batch], loss))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with probes.attach(model, nano.slots, mode=mode) as scope:
        for part in [batch.of(slot) for slot in nano.slots] if mode == "pure" else [batch]:
            with scope.rows(part.slots):
                total = loss(part)
            scaler.scale(total).backward()
        record = scope.step(optimizer, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    assert nano.gram_error(record.gram, expected) <= COARSE


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_layer_norms_under_autocast(toy, nano, autocast):
    """Their input is coarse, their weights are not."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    x, slots = toy.data(6)[0].float(), ["solver/0", "judge/0", "judge/0"] * 2

    def loss(rows):
        with torch.autocast("cpu", dtype=autocast):
            return model(x[rows]).square().sum()

    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = {}
    for slot in toy.slots:
        rows = [row for row, name in enumerate(slots) if name == slot]
        expected[slot] = dict(zip(names, torch.autograd.grad(loss(rows), parameters), strict=True))
    with probes.attach(model, toy.slots) as scope:
        with scope.rows(slots):
            total = loss(range(6))
        total.backward()
        found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
        record = scope.step(toy.sgd(model))
    assert nano.gram_error(record.gram, nano.gram(expected)) <= COARSE
    for name in ("1.weight", "1.bias"):  # autograd rounds its own to the coarse type
        gradient = model.get_parameter(name).grad
        gap = sum(parts[name] for parts in found.values()) - gradient
        assert gap.norm() <= torch.finfo(autocast).eps * gradient.norm()
