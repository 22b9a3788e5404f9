"""`observe` on a LoRA layer: one tap for both matrices, also where only one of them is trained."""

from __future__ import annotations

import pytest
import torch

from gradscope import probes

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)


def names_of_nodes(loss):
    seen, waiting, names = set(), [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(type(node).__name__)
            waiting.extend(parent for parent, _ in node.next_functions)
    return names


def test_a_lora_layer_has_one_tap(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    plain = names_of_nodes(nano.loss(model, batch))
    with probes.attach(model, nano.slots, mode="observe") as scope, scope.rows(batch.slots):
        observed = names_of_nodes(nano.loss(model, batch))
    assert len(observed) == len(plain) + 14


@pytest.mark.parametrize("mode", ["observe", "fused"])
@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_one_of_the_matrices_is_frozen(nano, mode, frozen):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    expected = nano.separate(model, [batch])
    with probes.attach(model, nano.slots, mode=mode) as scope:
        with scope.rows(batch.slots):
            nano.loss(model, batch).backward()
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        scope.step(torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    trained = {
        slot: {name: gradient for name, gradient in parts.items() if frozen not in name}
        for slot, parts in expected.items()
    }
    assert nano.gradient_error(found, trained) <= EXACT
    assert all(not found[slot][name].any() for slot in found for name in found[slot] if frozen in name)


@pytest.mark.parametrize("mode", ["observe", "fused"])
def test_another_adapter_is_activated_between_forward_and_backward(nano, mode):
    """`set_adapter` freezes the first adapter; its graph was built before and still gives it gradients."""
    model, batch = nano.lora(adapters=("generator", "aggregator")), nano.shuffled((3, 2, 4, 0))
    model.set_adapter("generator")
    own = [slot for slot, role in nano.slots.items() if role == "generator"]
    expected = nano.separate(model, [batch], slots=own)
    policies = {"generator": "generator", "aggregator": "aggregator"}
    with probes.attach(model, nano.slots, policies, mode=mode) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        model.set_adapter("aggregator")
        loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in own}
    assert nano.gradient_error(found, expected) <= EXACT


def test_nothing_of_the_forward_outlives_it(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots, mode="observe") as scope:
        with scope.rows(batch.slots):
            nano.loss(model, batch).backward()
        hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
        waiting = [hook for hook in hooks if getattr(hook, "waiting", None) is not None]
        assert len(hooks) >= 28
        assert not waiting
