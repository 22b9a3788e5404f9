"""`fused`: the same slot gradients as separate backwards, and training within rounding of plain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradscope import probes

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)
BIASED = {"lora_bias": True, "target_modules": ["q_proj", "o_proj"]}
"""A bias on the adapter is left to PEFT's own forward."""


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def weight_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward(nano, model, batches, scope=None, loss=None):
    """Runs micro-batches and returns the weight gradients."""
    loss = loss or (lambda batch: nano.loss(model, batch))
    model.zero_grad(set_to_none=True)
    for batch in batches:
        if scope is None:
            loss(batch).backward()
        else:
            with scope.rows(batch.slots):
                value = loss(batch)
            value.backward()
    return {name: gradient.clone() for name, gradient in weight_gradients(model).items()}


def worst_error(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).norm() / g.norm()) for n, g in expected.items() if g.any())


def check(nano, model, batches, *, loss=None, policies=None, expected=None, tolerance=EXACT, plain=None):
    """Slot gradients and Gram against separate backwards, weight gradients against plain training."""
    expected = expected or nano.separate(model, batches, loss)
    plain = plain or backward(nano, model, batches, loss=loss)
    with probes.attach(model, nano.slots, policies, mode="fused") as scope:
        gradients = backward(nano, model, batches, scope, loss)
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert nano.gradient_error(found, expected) <= tolerance
    assert nano.gram_error(record.gram, nano.gram(expected)) <= tolerance
    assert worst_error(gradients, plain) <= tolerance
    assert all(p.grad.dtype == p.dtype for p in trainable(model).values())
    return record


CASES = {
    "shuffled": lambda nano: [nano.shuffled(UNEVEN)],
    "left-padded": lambda nano: [nano.shuffled(UNEVEN, pad="left")],
    "long runs": lambda nano: [nano.shuffled(UNEVEN, length=60)],
    "equal rows in slot order": lambda nano: [nano.batch([s for s in nano.slots for _ in range(3)])],
    "equal blocks of some slots": lambda nano: [
        nano.batch([s for s in list(nano.slots)[1:3] * 2 for _ in range(3)]),
        nano.shuffled(UNEVEN, seed=4),
    ],
    "slot order twice": lambda nano: [nano.batch(list(nano.slots) * 2, length=20)],
    "micro-batches": lambda nano: [nano.shuffled(UNEVEN, seed=seed) for seed in range(3)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_exact_against_separate_backwards(nano, case, kind):
    model = nano.lora() if kind == "lora" else nano.model(attention_bias=True)
    record = check(nano, model, CASES[case](nano))
    assert record.coverage == ()


def one_node_for_each_layer(model, loss):
    """Counts the fused nodes in the graph of a loss."""
    seen, waiting, names = set(), [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(type(node).__name__)
        waiting.extend(parent for parent, _ in node.next_functions)
    return names


def test_a_lora_layer_is_one_node(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    plain = one_node_for_each_layer(model, nano.loss(model, batch))
    with probes.attach(model, nano.slots, mode="fused") as scope, scope.rows(batch.slots):
        fused = one_node_for_each_layer(model, nano.loss(model, batch))
    assert fused.count("_LoraBackward") == 14
    assert len(fused) <= len(plain) - 14 * 6
    assert not any("Identity" in name for name in fused)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"r": 3, "lora_alpha": 5},
        {"target_modules": ["q_proj", "down_proj"]},
        {"modules_to_save": ["lm_head"]},
        BIASED,
    ],
    ids=str,
)
def test_forward_is_that_of_peft(nano, settings):
    base = nano.model(attention_bias=True, tie_word_embeddings="modules_to_save" not in settings)
    model, batch = nano.lora(model=base, **settings), nano.shuffled(UNEVEN)
    plain = nano.row_losses(model, batch).detach()
    gradients = backward(nano, model, [batch])
    with probes.attach(model, nano.slots, mode="fused") as scope:
        with scope.rows(batch.slots):
            found = nano.row_losses(model, batch)
        torch.testing.assert_close(found.detach(), plain, rtol=EXACT, atol=EXACT)
        assert worst_error(backward(nano, model, [batch], scope), gradients) <= EXACT


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"modules_to_save": ["lm_head"]}, BIASED], ids=str
)
def test_kinds_of_lora(nano, settings):
    base = nano.model(attention_bias=True, tie_word_embeddings=False)
    record = check(nano, nano.lora(model=base, **settings), [nano.shuffled(UNEVEN)])
    assert record.coverage == ()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_gradient_checkpointing(nano, reentrant, kind):
    model = nano.lora() if kind == "lora" else nano.model()
    batches = [nano.shuffled(UNEVEN, seed=seed) for seed in range(2)]
    expected, plain = nano.separate(model, batches), backward(nano, model, batches)
    nano.checkpoint(model, reentrant=reentrant)
    if kind == "lora" or reentrant:
        model.enable_input_require_grads()
    check(nano, model, batches, expected=expected, plain=plain)


def test_several_forwards_before_one_backward(nano):
    model, batches = nano.lora(), [nano.shuffled(UNEVEN, seed=seed) for seed in range(2)]
    expected = nano.separate(model, batches)
    with probes.attach(model, nano.slots, mode="fused") as scope:
        losses = []
        for batch in batches:
            with scope.rows(batch.slots):
                losses.append(nano.loss(model, batch))
        sum(losses).backward()
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert nano.gradient_error(found, expected) <= EXACT


@pytest.mark.parametrize("dropout", [0.3])
def test_dropout_draws_the_numbers_that_peft_draws(nano, dropout):
    model, batch = nano.lora(lora_dropout=dropout).train(), nano.shuffled(UNEVEN)

    def loss(part):
        assert part is batch
        torch.manual_seed(7)
        return nano.loss(model, part)

    plain = backward(nano, model, [batch], loss=loss)
    after = torch.rand(3)
    with probes.attach(model, nano.slots, mode="fused") as scope:
        found = backward(nano, model, [batch], scope, loss)
        assert torch.equal(torch.rand(3), after)
        parts = [scope.slot_gradients(slot) for slot in nano.slots]
    assert worst_error(found, plain) <= EXACT
    assert worst_error({name: sum(p[name] for p in parts) for name in plain}, plain) <= EXACT


def packed(nano, slots, lengths, *, seed=0):
    """Rows of other lengths beside each other, with positions that start anew in each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 19, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    weights = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    return ids, positions, weights, [slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)]


class Tokens(nn.Module):
    """A network that looks at each token alone, so that packed rows cannot leak into each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Embedding(19, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, ids):
        return self.layers(ids)


@pytest.mark.parametrize("with_padding", [False, True])
def test_packed_rows(nano, with_padding):
    model = Tokens().double()
    names = list(nano.slots)
    slots = [names[0], names[1], names[0], names[3], None if with_padding else names[2]]
    ids, _, weights, tagged = packed(nano, slots, (5, 3, 40, 300, 7))
    counted = torch.tensor([slot is not None for slot in tagged])

    def loss(mask):
        return (model(ids)[0].square().sum(-1) * weights * mask).sum()

    with probes.attach(model, nano.slots, mode="fused") as scope:
        with scope.rows(tagged, packed=True):
            value = loss(counted)
        value.backward()
        found = {name: scope.slot_gradients(name) for name in names}
        total = {name: gradient.clone() for name, gradient in weight_gradients(model).items()}
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    for name in names:
        model.zero_grad()
        loss(torch.tensor([slot == name for slot in tagged])).backward()
        assert nano.gradient_error(found, {name: weight_gradients(model)}) <= EXACT
    model.zero_grad()
    loss(counted).backward()
    assert worst_error(total, weight_gradients(model)) <= EXACT


def test_rows_of_no_slot_count_in_the_weight_gradient(nano):
    """Their loss should be zero; where it is not, training stays right and the probe refuses the update."""
    model = nano.lora()
    batch = nano.shuffled(UNEVEN)
    plain = backward(nano, model, [batch])
    slots = [None if slot == "generator/1" else slot for slot in batch.slots]
    expected = nano.separate(model, [batch])
    scope = probes.attach(model, nano.slots, mode="fused")
    with scope.rows(slots):
        loss = nano.loss(model, batch)
    loss.backward()
    assert worst_error(weight_gradients(model), plain) <= EXACT
    found = scope.slot_gradients("generator/2")
    assert nano.gradient_error({"generator/2": found}, {"generator/2": expected["generator/2"]}) <= EXACT
    with pytest.raises(probes.ProbeError, match="miss autograd's gradient"):
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_without_announced_rows_the_weight_gradient_is_right(nano, kind):
    model = nano.lora() if kind == "lora" else nano.model(attention_bias=True)
    batch = nano.shuffled(UNEVEN)
    plain = backward(nano, model, [batch])
    with probes.attach(model, nano.slots, mode="fused"):
        assert worst_error(backward(nano, model, [batch]), plain) <= EXACT


def test_a_failure_of_the_probe_leaves_the_weight_gradient_right(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    plain = backward(nano, model, [batch])
    scope = probes.attach(model, nano.slots, mode="fused")
    with scope.rows(batch.slots[:-1]):
        loss = nano.loss(model, batch)
    model.zero_grad()
    loss.backward()
    assert worst_error(weight_gradients(model), plain) <= EXACT
    with pytest.raises(probes.ProbeError, match="9 rows were announced"):
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_adapter_for_each_role(nano):
    model, batch = nano.lora(adapters=("generator", "aggregator")), nano.shuffled(UNEVEN)
    policies = {"generator": "generator", "aggregator": "aggregator"}
    with probes.attach(model, nano.slots, policies, mode="fused") as scope:
        for policy in policies:
            part = batch.take([row for row, slot in enumerate(batch.slots) if nano.slots[slot] == policy])
            model.set_adapter(policy)
            own = [slot for slot, role in nano.slots.items() if role == policy]
            expected = nano.separate(model, [part], slots=own)
            plain = backward(nano, model, [part])
            assert worst_error(backward(nano, model, [part], scope), plain) <= EXACT
            found = {slot: scope.slot_gradients(slot) for slot in own}
            assert nano.gradient_error(found, expected) <= EXACT
            record = scope.step(torch.optim.SGD([p for p in model.parameters() if p.grad is not None]))
            assert record.policy == policy


def test_two_active_adapters_are_left_to_peft(nano):
    model, batch = nano.lora(adapters=("default", "second")), nano.shuffled(UNEVEN)
    model.base_model.set_adapter(["default", "second"])
    plain = backward(nano, model, [batch])
    policies = dict.fromkeys(nano.slots.values(), "default")
    with probes.attach(model, nano.slots, policies, mode="fused") as scope:
        found = backward(nano, model, [batch], scope)
        total = {}
        for slot in nano.slots:
            for name, gradient in scope.slot_gradients(slot).items():
                total[name] = total.get(name, 0) + gradient
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())
    assert worst_error(total, {name: plain[name] for name in total}) <= EXACT


def test_disabled_adapters_and_passes_without_gradients(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    with torch.no_grad():
        plain = nano.row_losses(model, batch)
        with model.disable_adapter():
            base = nano.row_losses(model, batch)
    assert not torch.equal(plain, base)
    with probes.attach(model, nano.slots, mode="fused"), torch.no_grad():
        assert torch.equal(nano.row_losses(model, batch), plain)
        with model.disable_adapter():
            assert torch.equal(nano.row_losses(model, batch), base)


def test_someone_elses_hook_on_a_matrix_still_runs(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    matrix = next(m for name, m in model.named_modules() if name.endswith("lora_A.default"))
    calls = []
    handle = matrix.register_forward_hook(lambda *_: calls.append(1))
    check(nano, model, [batch])
    assert len(calls) > len(nano.slots) + 1
    handle.remove()


def test_inputs_without_gradients_and_a_bias():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 1, bias=False)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with probes.attach(model, {"a": "a", "b": "b"}, mode="fused") as scope:
        with scope.rows(list("aabbab")):
            model(x).square().sum().backward(retain_graph=False)
        for found, expected in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(found.grad, expected, rtol=EXACT, atol=EXACT)
        only = scope.slot_gradients("b")
        scope.step(torch.optim.SGD(model.parameters()))
    model.zero_grad()
    model(x[[2, 3, 5]]).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(only[name], parameter.grad, rtol=EXACT, atol=EXACT)


def test_a_second_backward_of_the_same_graph_adds_up(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots, mode="fused") as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        loss.backward(retain_graph=True)
        once = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        loss.backward()
        twice = {slot: scope.slot_gradients(slot) for slot in nano.slots}
    doubled = {slot: {n: 2 * g for n, g in parts.items()} for slot, parts in once.items()}
    assert nano.gradient_error(twice, doubled) <= EXACT
