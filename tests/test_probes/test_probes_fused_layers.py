"""`fused` where no node can stand for a LoRA layer, packed rows through a transformer, and norms as nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.probes.taps.norms import read_affine

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)


class Quantised(nn.Linear):
    """Stands for a quantised base: frozen whole numbers with a scale for each output."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, dtype=torch.float64)
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.scale).round(), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale)


def run(nano, model, batch, mode, loss_of=None, **settings):
    """Weight gradients and slot gradients of one batch."""
    model.zero_grad()
    with probes.attach(model, nano.slots, mode=mode, **settings) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch) if loss_of is None else loss_of(batch)
        loss.backward()
        parts = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, parts, record


def plain(nano, model, batch, loss_of=None):
    model.zero_grad()
    (nano.loss(model, batch) if loss_of is None else loss_of(batch)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_layers_with_dora_are_left_to_peft(nano):
    model, batch = nano.lora(use_dora=True), nano.shuffled(UNEVEN)
    expected = plain(nano, model, batch)
    with pytest.warns(UserWarning, match="only in updates"):
        found, _, record = run(nano, model, batch, "fused")
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert record.coverage
    own = batch.of("generator/2")
    separate = nano.separate(model, [batch])["generator/2"]
    with pytest.warns(UserWarning, match="only in updates"):
        _, parts, record = run(nano, model, own, "fused")
    assert record.coverage == ()  # one slot, so that hooks count too
    assert nano.gradient_error({"generator/2": parts["generator/2"]}, {"generator/2": separate}) <= EXACT


def test_rows_with_adapters_of_their_own_are_left_to_peft(nano):
    model, batch = nano.lora(adapters=("generator", "aggregator")).eval(), nano.shuffled(UNEVEN)
    model.base_model.set_adapter(["generator", "aggregator"])
    names = [nano.slots[slot] for slot in batch.slots]

    def loss_of(part):
        logits = model(
            input_ids=part.ids, attention_mask=part.attention, use_cache=False, adapter_names=names
        ).logits
        chosen = logits.log_softmax(-1)[:, :-1].gather(-1, part.ids[:, 1:, None])[..., 0]
        return (chosen * part.weights).sum()

    expected = plain(nano, model, batch, loss_of)
    scope = probes.attach(
        model, nano.slots, {"generator": "generator", "aggregator": "aggregator"}, mode="fused"
    )
    model.zero_grad()
    with scope.rows(batch.slots):
        loss = loss_of(batch)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    # Each adapter sees its own rows alone, which are not those that were announced.
    with pytest.raises(probes.ProbeError, match="rows were announced"):
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_adapters_on_a_quantised_base(nano):
    base = nano.model()
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("proj"):
                setattr(module, name, Quantised(child))
    model, batch = nano.lora(model=base), nano.shuffled(UNEVEN)
    expected = nano.separate(model, [batch])
    gradients = plain(nano, model, batch)
    found, parts, record = run(nano, model, batch, "fused")
    assert nano.gradient_error(parts, expected) <= EXACT
    assert nano.gram_error(record.gram, nano.gram(expected)) <= EXACT
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_packed_rows_through_a_transformer(nano, kind, dtype):
    """The loss of a slot is that of its tokens; positions start anew in every row, which separates them."""
    model = nano.lora(dtype=dtype) if kind == "lora" else nano.model(dtype=dtype)
    lengths, slots = (5, 3, 9, 2, 6), [*nano.slots, "generator/1"]
    tagged = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 19, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    weights = torch.randn(sum(lengths), generator=generator, dtype=dtype)

    def loss_of(mask):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        return (logits.log_softmax(-1).gather(-1, ids[0].roll(-1)[:, None])[:, 0] * weights * mask).sum()

    def separate(slot):
        model.zero_grad()
        loss_of(torch.tensor([slot in (None, tag) for tag in tagged])).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, total = {slot: separate(slot) for slot in nano.slots}, separate(None)
    model.zero_grad()
    with probes.attach(model, nano.slots, mode="fused") as scope:
        with scope.rows(tagged, packed=True):
            loss = loss_of(1.0)
        loss.backward()
        parts = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    tolerance = EXACT if dtype == torch.float64 else 1e-5
    assert nano.gradient_error(parts, expected) <= tolerance
    assert nano.gradient_error({"all": found}, {"all": total}) <= tolerance


class PlainNorm(nn.Module):
    """w x / sqrt(mean x^2 + eps), in the type of x."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(features) + 0.5), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ShiftedNorm(PlainNorm):
    """Another norm, which looks like the first from outside."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


def test_the_formula_of_a_norm_is_found_by_trying():
    affine = read_affine(PlainNorm(6))
    assert torch.float32 in affine.formula.dtypes
    assert torch.float64 in read_affine(PlainNorm(6).double()).formula.dtypes
    assert read_affine(ShiftedNorm(6)).formula is None
    assert read_affine(nn.LayerNorm(6)).formula is None
    assert torch.float32 in read_affine(nn.RMSNorm(6, eps=1e-6)).formula.dtypes


@pytest.mark.parametrize("cls", [PlainNorm, ShiftedNorm])
def test_norms_as_one_node(nano, cls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), cls(6), nn.Tanh(), nn.Linear(6, 6), cls(6)).double()
    x, slots = torch.randn(7, 4, 5, dtype=torch.float64, requires_grad=True), list("abbacab")

    def gradients(rows):
        model.zero_grad()
        x.grad = None
        model(x)[rows].pow(3).sum().backward()
        return [p.grad.clone() for p in model.parameters()], x.grad.clone()

    expected = {s: gradients([row for row, name in enumerate(slots) if name == s])[0] for s in "abc"}
    total, for_x = gradients(list(range(7)))
    with probes.attach(model, dict.fromkeys("abc", "role"), mode="fused") as scope:
        with scope.rows(slots):
            output = model(x)
        node = type(output.grad_fn).__name__
        assert node == ("_NormBackward" if cls is PlainNorm else "_IdentityBackward")
        model.zero_grad()
        x.grad = None
        output.pow(3).sum().backward()
        for slot, right in expected.items():
            found = scope.slot_gradients(slot).values()
            torch.testing.assert_close(list(found), right, rtol=EXACT, atol=EXACT)
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close([p.grad for p in model.parameters()], total, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(x.grad, for_x, rtol=EXACT, atol=EXACT)
