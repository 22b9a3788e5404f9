"""`verify` compares the row split with a masked loss, and fails on wrong slots and on losses that leak."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.errors import ProbeError

UNEVEN = (3, 2, 4, 1)


def closure(nano, scope, model, batch, announced=None):
    def loss_of_rows(mask):
        with scope.rows(announced or batch.slots):
            losses = nano.row_losses(model, batch)
        return (losses * mask).sum()

    return loss_of_rows


@pytest.mark.parametrize("full", [False, True])
def test_right_slots_pass(nano, full):
    model, batch = nano.model() if full else nano.lora(), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots) as scope:
        for slot in nano.slots:
            result = scope.verify(closure(nano, scope, model, batch), batch.slots, slot=slot)
            assert result.slot == slot
            assert result.relative_error <= 1e-12


def test_rolled_slots_fail(nano):
    model, batch = nano.lora(), nano.shuffled((2, 2, 2, 2))
    rolled = [*batch.slots[1:], batch.slots[0]]
    with probes.attach(model, nano.slots) as scope:
        with pytest.raises(ProbeError, match=r"differs by .* rows\(\) was given other slots"):
            scope.verify(closure(nano, scope, model, batch, rolled), batch.slots)
        assert scope.attached


@pytest.mark.parametrize("pair", list(combinations(range(4), 2)))
def test_every_swap_of_two_slots_fails(nano, pair):
    """Whichever slots are confused, and however small their gradients are."""
    model, batch = nano.lora(), nano.shuffled((2, 2, 2, 2))
    first, second = (list(nano.slots)[place] for place in pair)
    swapped = [{first: second, second: first}.get(slot, slot) for slot in batch.slots]
    with (
        probes.attach(model, nano.slots) as scope,
        pytest.raises(ProbeError, match=f"measured for slot '{first}' differs"),
    ):
        scope.verify(closure(nano, scope, model, batch, swapped), batch.slots)


def test_all_slots_are_compared(nano):
    model, batch, masks = nano.lora(), nano.batch(["generator/0", "aggregator/0", "generator/2"]), []
    with probes.attach(model, nano.slots) as scope:
        loss_of_rows = closure(nano, scope, model, batch)
        result = scope.verify(lambda mask: (masks.append(mask.tolist()), loss_of_rows(mask))[1], batch.slots)
    assert list(result.errors) == ["generator/0", "generator/2", "aggregator/0"]
    assert max(result.errors.values()) == result.relative_error == result.errors[result.slot] <= 1e-12
    assert masks == [[True] * 3, [True, False, False], [False, False, True], [False, True, False]]


def test_a_loss_across_rows_fails():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    slots = ["a", "a", "b", "b", "b", "a"]
    with probes.attach(model, {"a": "a", "b": "b"}) as scope:

        def centred(mask):
            with scope.rows(slots):
                scores = model(x).squeeze(1)
            return (((scores - scores.mean()) ** 2) * mask).sum()

        with pytest.raises(ProbeError, match="depends on rows of other slots"):
            scope.verify(centred, slots)


def test_dropout_is_the_same_in_both_passes_and_nothing_is_left_behind(nano):
    model, batch = nano.lora(lora_dropout=0.3).train(), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        copies = {name: g.clone() for name, g in gradients.items() if g is not None}
        state, sums = torch.get_rng_state(), scope.slot_gradients("generator/1")
        result = scope.verify(closure(nano, scope, model, batch), batch.slots)
        assert result.relative_error <= 1e-12
        assert torch.equal(torch.get_rng_state(), state)
        for name, parameter in model.named_parameters():
            assert parameter.grad is gradients[name]
            assert parameter.grad is None or torch.equal(parameter.grad, copies[name])
        for name, gradient in scope.slot_gradients("generator/1").items():
            assert torch.equal(gradient, sums[name])
        record = scope.step(torch.optim.SGD(model.parameters()))
    assert record.counts["num_rows"].tolist() == list(UNEVEN)


def test_without_signal_there_is_nothing_to_compare(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots) as scope:
        result = scope.verify(lambda mask: 0 * closure(nano, scope, model, batch)(mask), batch.slots)
    assert result.relative_error != result.relative_error


def test_misuse_is_refused(nano):
    model, batch = nano.lora(), nano.batch(["generator/0", "generator/1"])
    with probes.attach(model, nano.slots) as scope:
        with pytest.raises(ProbeError, match="slot 'aggregator/0' has no rows among those given"):
            scope.verify(closure(nano, scope, model, batch), batch.slots, slot="aggregator/0")
        with pytest.raises(ProbeError, match="nothing was measured"):
            scope.verify(lambda mask: (nano.row_losses(model, batch) * mask).sum(), batch.slots)
        with pytest.raises(ProbeError, match="returned float instead of a loss"):
            scope.verify(lambda mask: 1.0, batch.slots)
        with pytest.raises(ProbeError, match=r"verify\(\): .* but 1 rows were announced"):
            scope.verify(closure(nano, scope, model, batch, ["generator/0"]), batch.slots)
