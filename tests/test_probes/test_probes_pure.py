"""Hooks on parameters: exact for every type of parameter where a backward holds one slot, else left out."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gradscope import probes
from gradscope.errors import ProbeError

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)


def moe():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.2, experts_implementation="eager",
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).double()


class Composite(nn.Module):
    """Holds parameters beside modules: a gate, and a linear layer of which it takes the weight itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Parameter(torch.randn(8))
        self.bypassed = nn.Linear(3, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        hidden = nn.functional.linear(x, self.bypassed.weight, self.bypassed.bias)
        return self.out(torch.tanh(hidden) * self.gate)


MODELS = {
    "dora": lambda nano: nano.lora(use_dora=True, target_modules=["q_proj", "down_proj"]),
    "mixture of experts": lambda nano: moe(),
    "lora on experts": lambda nano: nano.lora(
        model=moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    ),
    "full": lambda nano: nano.model(attention_bias=True),
}


def attach(model, slots, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of parameters that are covered by hooks only
        return probes.attach(model, slots, mode=mode)


def per_slot(nano, batches):
    return [batch.of(slot) for batch in batches for slot in nano.slots if slot in batch.slots]


@pytest.mark.parametrize("mode", ["pure", "auto"])
@pytest.mark.parametrize("kind", MODELS)
def test_micro_batches_of_one_slot_cover_everything(nano, kind, mode):
    model = MODELS[kind](nano)
    batches = [nano.shuffled(UNEVEN), nano.shuffled((1, 2, 1, 2), seed=4)]
    expected = nano.separate(model, batches)
    with attach(model, nano.slots, mode) as scope:
        for part in per_slot(nano, batches):
            with scope.rows(part.slots):
                loss = nano.loss(model, part)
            loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        record = scope.step(torch.optim.SGD(model.parameters()))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(found["generator/0"]) == trained
    assert record.coverage == ()
    assert record.counts["num_rows"].tolist() == [4, 4, 5, 3]
    assert nano.gradient_error(found, expected) <= EXACT
    assert nano.gram_error(record.gram, nano.gram(expected)) <= EXACT
    assert max(scope.residuals.values()) <= EXACT


@pytest.mark.parametrize("kind", ["dora", "mixture of experts", "lora on experts"])
def test_a_mixed_micro_batch_leaves_hooked_parameters_out_of_its_update_only(nano, kind):
    model, mixed = MODELS[kind](nano), nano.shuffled(UNEVEN)
    expected = nano.separate(model, [mixed])
    with attach(model, nano.slots, "auto") as scope:
        hooked = set(scope.coverage)
        for batches in ([mixed], [nano.batch(["generator/0"] * 2), mixed], per_slot(nano, [mixed])):
            for part in batches:
                with scope.rows(part.slots):
                    loss = nano.loss(model, part)
                loss.backward()
            total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
            record = scope.step(torch.optim.SGD(model.parameters()))
            assert record.scalars["grad_norm"] == pytest.approx(float(total), rel=EXACT)
            model.zero_grad()
            if batches[0] is mixed:
                assert set(record.coverage) == hooked
                truth = {
                    slot: {name: part for name, part in parts.items() if name not in hooked}
                    for slot, parts in expected.items()
                }
                assert nano.gram_error(record.gram, nano.gram(truth)) <= EXACT
            elif len(batches) == 2:
                assert set(record.coverage) == hooked
        assert record.coverage == ()
        assert nano.gram_error(record.gram, nano.gram(expected)) <= EXACT


def parts_of(toy, model):
    x, y = toy.data(6)

    def loss(rows):
        return ((model(x[rows]) - y[rows]) ** 2).sum()

    return {"solver/0": (slice(0, 2), slice(2, 4)), "judge/0": (slice(4, 6),)}, loss


def truth_of(model, parts, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = {slot: torch.autograd.grad(sum(map(loss, rows)), parameters) for slot, rows in parts.items()}
    return {slot: dict(zip(names, found, strict=True)) for slot, found in gradients.items()}


@pytest.mark.parametrize("mode", ["pure", "auto"])
def test_parameters_of_composite_modules(toy, nano, mode):
    model = Composite().double()
    parts, loss = parts_of(toy, model)
    truth = truth_of(model, parts, loss)
    scope = attach(model, toy.slots, mode)
    if mode == "auto":  # the tap on the bypassed layer sees nothing, and says so
        with scope.rows(["solver/0"] * 2):
            loss(slice(0, 2)).backward()
        with pytest.raises(ProbeError, match=r"no tap saw, for instance 'bypassed\.weight'"):
            scope.step(toy.sgd(model))
        return
    for slot, stretches in parts.items():
        for rows in stretches:
            with scope.rows([slot] * 2):
                total = loss(rows)
            total.backward()
    found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
    record = scope.step(toy.sgd(model))
    scope.detach()
    assert record.coverage == ()
    assert nano.gradient_error(found, truth) <= EXACT


@pytest.mark.parametrize("mode", ["pure", "auto"])
def test_backward_passes_in_any_order_after_several_forward_passes(toy, nano, mode):
    model = nn.Sequential(nn.Linear(3, 8), toy.unknown_layer(), nn.Linear(8, 1)).double()
    parts, loss = parts_of(toy, model)
    truth = truth_of(model, parts, loss)
    with attach(model, toy.slots, mode) as scope:
        losses = []
        for slot, stretches in parts.items():
            for rows in stretches:
                with scope.rows([slot] * 2):
                    losses.append(loss(rows))
        losses[2].backward()
        (losses[0] + losses[1]).backward()  # both are the solver's
        found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
        assert scope.step(toy.sgd(model)).coverage == ()
    assert nano.gradient_error(found, truth) <= EXACT


def test_one_backward_of_several_slots(toy):
    model = nn.Sequential(nn.Linear(3, 8), toy.unknown_layer(), nn.Linear(8, 1)).double()
    for mode in ("auto", "pure"):
        model.zero_grad()
        scope = attach(model, toy.slots, mode)
        parts, loss = parts_of(toy, model)
        total = 0
        for slot, stretches in parts.items():
            with scope.rows([slot] * 2):
                total = total + loss(stretches[0])
        total.backward()
        if mode == "auto":
            assert scope.step(toy.sgd(model)).coverage == ("1.factor",)
            scope.detach()
        else:
            with pytest.raises(
                ProbeError, match=r"one backward pass held the rows of judge/0, solver/0; mode"
            ):
                scope.step(toy.sgd(model))


def test_mixed_rows_are_refused(toy):
    with (
        probes.attach(toy.model(), toy.slots, mode="pure") as scope,
        pytest.raises(ProbeError, match=r"got rows of solver/0, judge/0 in one micro-batch; mode 'pure'"),
        scope.rows(["solver/0", "judge/0"]),
    ):
        pass


def test_a_forward_pass_outside_rows_is_refused(toy):
    model = toy.model()
    scope = probes.attach(model, toy.slots, mode="pure")
    toy.run(scope, model, ["solver/0"])
    model(toy.data()[0]).sum().backward()
    with pytest.raises(ProbeError, match=r"'0.weight' got a gradient by a forward pass outside rows\(\)|3\."):
        scope.step(toy.sgd(model))


def test_a_penalty_on_the_weights_is_refused(toy):
    model = toy.model()
    scope = probes.attach(model, toy.slots, mode="pure")
    toy.run(scope, model, ["solver/0"])
    (model[0].weight ** 2).sum().backward()
    with pytest.raises(ProbeError, match=r"'0.weight' got a gradient by no module call that shows its rows"):
        scope.step(toy.sgd(model))


def test_halves_and_labels_of_one_backward_cannot_be_told_apart(toy):
    """The Gram matrix is exact; what it would take to divide it is said to be missing."""
    model = toy.model()
    with probes.attach(model, toy.slots, mode="pure", labels=("right", "wrong")) as scope:
        toy.run(scope, model, ["solver/0"] * 2, problems=["a", "b"], labels=["right", "wrong"])
        toy.run(scope, model, ["judge/0"], problems=["a"], labels=["right"])
        toy.run(scope, model, ["judge/0"], problems=["b"], labels=["wrong"])
        record = scope.step(toy.sgd(model))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert record.gram.sum() == pytest.approx(float(gradient @ gradient), rel=EXACT)
    assert np.isnan(record.gram_cross[0]).all()
    assert math.isfinite(record.gram_cross[1, 1])
    assert np.isnan(record.label_gram[0]).all()
    assert np.isfinite(record.label_gram[1, :, 1, :]).all()


def test_gradients_are_bitwise_those_without_hooks(nano):
    batch = nano.shuffled(UNEVEN)

    def gradients(probed):
        model = nano.lora(dtype=torch.float32, use_dora=True)
        scope = probes.attach(model, nano.slots, mode="pure") if probed else None
        for part in per_slot(nano, [batch]):
            if scope is None:
                nano.loss(model, part).backward()
            else:
                with scope.rows(part.slots):
                    nano.loss(model, part).backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    plain, probed = gradients(False), gradients(True)
    assert len(plain) == len(probed) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))


def test_a_run_with_hooks_and_checkpointing(nano):
    for reentrant in (False, True):
        model, batches = nano.lora(use_dora=True, target_modules=["q_proj"]), [nano.shuffled(UNEVEN)]
        expected = nano.separate(model, batches)
        nano.checkpoint(model, reentrant=reentrant)
        model.enable_input_require_grads()
        with attach(model, nano.slots, "auto") as scope:
            for part in per_slot(nano, batches):
                with scope.rows(part.slots):
                    loss = nano.loss(model, part)
                loss.backward()
            found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
            assert scope.step(torch.optim.SGD(model.parameters())).coverage == ()
        assert nano.gradient_error(found, expected) <= EXACT


def test_wrong_slots_are_found_by_verify(toy):
    model = toy.model()
    x, y = toy.data(3)
    with probes.attach(model, toy.slots, mode="pure") as scope:

        def loss_of_rows(mask):
            with scope.rows(["solver/0"] * 3):
                losses = ((model(x) - y) ** 2).squeeze(1)
            return (losses * mask).sum()

        assert scope.verify(loss_of_rows, ["solver/0"] * 3).relative_error <= EXACT
        with pytest.raises(ProbeError, match="was given other slots than the rows have"):
            scope.verify(loss_of_rows, ["solver/0", "judge/0", "judge/0"], slot="solver/0")
