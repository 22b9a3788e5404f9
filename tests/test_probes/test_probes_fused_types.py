"""`fused` in the types that training uses, over many steps, and taken off again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradscope import probes

UNEVEN = (3, 2, 4, 1)
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32 adapters on a bfloat16 base": (torch.bfloat16, torch.float32),
    "bfloat16 adapters on a float32 base": (torch.float32, torch.bfloat16),
}
"""Types of base and adapters."""
NO_WORSE = 1.3
"""How much farther from double precision than plain training's a gradient or output may lie by chance."""


def adapters_of_type(model, dtype):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return model


def gradients(nano, model, batch, *, mode, cast=False):
    """Weight gradients, and the Gram matrix with `mode`."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
        if mode is None:
            loss = nano.loss(model, batch)
        else:
            scope = probes.attach(model, nano.slots, mode=mode)
            with scope.rows(batch.slots):
                loss = nano.loss(model, batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gram = None
    if mode is not None:
        gram = scope.step(torch.optim.SGD(model.parameters(), lr=0.1)).gram
        scope.detach()
    return found, gram


def gap(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def worst_gap(found, expected):
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == gradient.dtype for name, gradient in expected.items())
    return max(gap(found[name], gradient) for name, gradient in expected.items())


def assert_no_worse(fused, plain, truth):
    """Judged over all parameters together: each alone has too few numbers for its rounding to average out."""
    assert fused.keys() == plain.keys() == truth.keys()
    assert all(fused[name].dtype == gradient.dtype for name, gradient in plain.items())
    flat = [torch.cat([parts[name].double().flatten() for name in truth]) for parts in (fused, plain, truth)]
    assert gap(flat[0], flat[2]) <= NO_WORSE * gap(flat[1], flat[2])


def in_double(model):
    """The same numbers in double precision: what every rounding is judged against."""
    return copy.deepcopy(model).double()


@pytest.mark.parametrize("case", TYPES)
def test_weight_gradients_are_plain_trainings_within_rounding(nano, case):
    base, own = TYPES[case]
    model = adapters_of_type(nano.lora(dtype=base), own)
    batch = nano.shuffled(UNEVEN)
    plain, _ = gradients(nano, model, batch, mode=None)
    fused, gram = gradients(nano, model, batch, mode="fused")
    truth, exact = gradients(nano, in_double(model), batch, mode="observe")
    assert_no_worse(fused, plain, truth)
    assert nano.gram_error(gram, exact) <= (1e-5 if case == "float32" else 3e-2)
    assert case != "float32" or worst_gap(fused, plain) <= 1e-5


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_autocast(nano, kind):
    model = nano.lora(dtype=torch.float32) if kind == "lora" else nano.model(dtype=torch.float32)
    batch = nano.shuffled(UNEVEN)
    plain, _ = gradients(nano, model, batch, mode=None, cast=True)
    fused, gram = gradients(nano, model, batch, mode="fused", cast=True)
    truth, exact = gradients(nano, in_double(model), batch, mode="observe")
    assert_no_worse(fused, plain, truth)
    assert nano.gram_error(gram, exact) <= 3e-2


@pytest.mark.parametrize("case", TYPES)
def test_output_and_input_gradient_have_the_types_and_the_rounding_of_peft(nano, case):
    base, own = TYPES[case]
    model = adapters_of_type(nano.lora(dtype=base), own)
    exact = in_double(model)
    torch.manual_seed(3)
    x = torch.randn(10, 7, 16, dtype=base, requires_grad=True)
    weights = torch.randn(10, 7, 24, dtype=base)

    def results(network, x):
        layer = next(module for name, module in network.named_modules() if name.endswith("0.mlp.up_proj"))
        y = layer(x)
        return y.detach(), *torch.autograd.grad((y * weights).sum(), x)

    plain, truth = results(model, x), results(exact, x.detach().double().requires_grad_())
    with probes.attach(model, nano.slots, mode="fused"):
        fused = results(model, x)
    for found, expected, right in zip(fused, plain, truth, strict=True):
        assert found.dtype == expected.dtype == base
        assert gap(found, right) <= NO_WORSE * gap(expected, right)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-3)])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_fifty_steps_end_where_plain_training_ends(nano, kind, dtype, tolerance):
    """AdamW turns the sign of a tiny gradient into a whole step, so float32 drifts by more than rounding."""

    def train(mode):
        model = nano.lora(dtype=dtype) if kind == "lora" else nano.model(dtype=dtype)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)
        scope = None if mode is None else probes.attach(model, nano.slots, mode=mode)
        for step in range(50):
            batch = nano.shuffled((1, 1, 1, 1), seed=step, length=6)
            if scope is None:
                nano.loss(model, batch).backward()
            else:
                with scope.rows(batch.slots):
                    nano.loss(model, batch).backward()
                scope.step(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}

    plain, fused = train(None), train("fused")
    assert worst_gap(fused, plain) <= tolerance


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_detach_gives_every_module_its_forward_back(nano, kind):
    model = nano.lora() if kind == "lora" else nano.model()
    batch = nano.batch(["generator/0", "aggregator/0"])
    before = nano.row_losses(model, batch)
    scope = probes.attach(model, nano.slots, mode="fused")
    replaced = [module for module in model.modules() if "forward" in module.__dict__]
    assert len(replaced) == (14 if kind == "lora" else 15 + 9)  # and the norms
    scope.detach()
    scope.detach()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    after = nano.row_losses(model, batch)
    assert torch.equal(after, before)
    assert type(after.grad_fn) is type(before.grad_fn)


def test_a_module_with_a_forward_of_its_own_keeps_it(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    layer = next(module for name, module in model.named_modules() if name.endswith("0.mlp.up_proj"))
    own = layer.forward
    calls = []

    def forward(x):
        calls.append(1)
        return own(x)

    layer.forward = forward
    plain, _ = gradients(nano, model, batch, mode=None)
    fused, _ = gradients(nano, model, batch, mode="fused")
    assert worst_gap(fused, plain) <= 1e-12
    assert len(calls) == 2
    assert layer.forward is forward


def test_a_trained_base_layer_is_left_to_its_own_node(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    base = next(m for name, m in model.named_modules() if name.endswith("1.mlp.up_proj.base_layer"))
    base.weight.requires_grad_()
    expected = nano.separate(model, [batch])
    plain, _ = gradients(nano, model, batch, mode=None)
    with probes.attach(model, nano.slots, mode="fused") as scope:
        model.zero_grad()
        with scope.rows(batch.slots):
            nano.loss(model, batch).backward()
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        total = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert isinstance(base, nn.Linear)
    assert worst_gap(total, plain) <= 1e-12
    assert nano.gradient_error(found, expected) <= 1e-12
