"""Slot gradients equal one separate backward for each slot, in every way the model may be run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope import probes

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)
LAYOUTS = {
    "shuffled": {"rows_per_slot": UNEVEN},
    "left-padded": {"rows_per_slot": UNEVEN, "pad": "left"},
    "long runs": {"rows_per_slot": UNEVEN, "length": 60},
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora(nano, layout):
    model = nano.lora()
    nano.check(model, [nano.shuffled(**LAYOUTS[layout])])


def test_equal_rows_in_slot_order_take_one_batched_product(nano):
    batch = nano.batch([slot for slot in nano.slots for _ in range(3)])
    nano.check(nano.lora(), [batch])


def test_equal_rows_of_some_slots_only(nano):
    names = list(nano.slots)
    batches = [nano.batch([names[1]] * 2 + [names[2]] * 2), nano.shuffled(UNEVEN)]
    nano.check(nano.lora(), batches)


def test_rank_stabilised_lora_with_bias(nano):
    base = nano.model(attention_bias=True)
    model = nano.lora(model=base, use_rslora=True, lora_bias=True, target_modules=["q_proj", "o_proj"])
    record = nano.check(model, [nano.shuffled(UNEVEN)])
    assert record.coverage == ()


def test_lora_with_saved_modules(nano):
    model = nano.lora(modules_to_save=["lm_head"], model=nano.model(tie_word_embeddings=False))
    record = nano.check(model, [nano.shuffled(UNEVEN)])
    assert record.coverage == ()


def test_full_fine_tuning_with_tied_embedding_norms_and_biases(nano):
    model = nano.model(attention_bias=True)
    record = nano.check(model, [nano.shuffled(UNEVEN), nano.shuffled((1, 2, 2, 3), seed=5)])
    assert record.coverage == ()


def test_full_fine_tuning_with_padding_embedding(nano):
    model = nano.model(pad_token_id=3, tie_word_embeddings=False)
    assert model.get_input_embeddings().padding_idx == 3
    nano.check(model, [nano.shuffled(UNEVEN)])


def test_micro_batches_of_any_composition(nano):
    whole = nano.shuffled(UNEVEN)
    nano.check(nano.lora(), [whole.take([0, 1, 2]), whole.take([3]), whole.take(range(4, 10))])


def test_several_forwards_before_one_backward(nano):
    model, batches = nano.lora(), [nano.shuffled(UNEVEN, seed=seed) for seed in range(3)]

    def run(scope):
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            with scope.rows(batch.slots):
                total = total + nano.loss(model, batch)
        total.backward()

    nano.check(model, batches, run=run)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_gradient_checkpointing(nano, reentrant, together):
    model, batches = nano.lora(), [nano.shuffled(UNEVEN, seed=seed) for seed in range(2)]
    expected = nano.separate(model, batches)
    nano.checkpoint(model, reentrant=reentrant)
    model.enable_input_require_grads()

    def run(scope):
        losses = []
        for batch in batches:
            with scope.rows(batch.slots):
                losses.append(nano.loss(model, batch))
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()

    nano.check(model, batches, run=run, expected=expected)


def test_full_fine_tuning_under_checkpointing(nano):
    model = nano.model()
    batches = [nano.shuffled(UNEVEN)]
    expected = nano.separate(model, batches)
    nano.checkpoint(model, reentrant=False)
    nano.check(model, batches, expected=expected)


def test_dropout_against_masked_losses_under_the_same_masks(nano):
    model, batch = nano.lora(lora_dropout=0.3).train(), nano.shuffled(UNEVEN)
    expected = {}
    for slot in nano.slots:
        torch.manual_seed(11)
        model.zero_grad()
        mask = torch.tensor([name == slot for name in batch.slots])
        (nano.row_losses(model, batch) * mask).sum().backward()
        expected[slot] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.manual_seed(11)
    nano.check(model, [batch], expected=expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("rows_per_slot", [UNEVEN, (2, 2, 2, 2)])
def test_on_a_gpu(nano, full, rows_per_slot):
    model = (nano.model() if full else nano.lora()).cuda()
    batch = nano.shuffled(rows_per_slot)
    moved = type(batch)(batch.ids.cuda(), batch.attention.cuda(), batch.weights.cuda(), batch.slots)
    nano.check(model, [moved])
    with probes.attach(model, nano.slots) as scope:

        def loss_of_rows(mask):
            with scope.rows(moved.slots):
                losses = nano.row_losses(model, moved)
            return (losses * mask.cuda()).sum()

        assert scope.verify(loss_of_rows, moved.slots).relative_error <= EXACT


def test_one_adapter_for_each_role(nano):
    model, batch = nano.lora(adapters=("generator", "aggregator")), nano.shuffled(UNEVEN)
    policies = {"generator": "generator", "aggregator": "aggregator"}
    parts = {
        policy: batch.take([row for row, slot in enumerate(batch.slots) if nano.slots[slot] == policy])
        for policy in policies
    }
    expected = {}
    for policy, part in parts.items():
        model.set_adapter(policy)
        own = [slot for slot, role in nano.slots.items() if role == policy]
        expected |= nano.separate(model, [part], slots=own)
    # Slots of both adapters are known from the start, although only one adapter now requires gradients.
    with probes.attach(model, nano.slots, policies) as scope:
        for policy, part in parts.items():
            model.set_adapter(policy)
            with scope.rows(part.slots):
                loss = nano.loss(model, part)
            loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.grad is not None)
        records = scope.step(torch.optim.AdamW([p for p in model.parameters() if p.grad is not None]))
    assert nano.gradient_error(found, expected) <= EXACT
    assert [record.policy for record in records] == ["generator", "aggregator"]
    for record, own in zip(records, ([0, 1, 2], [3]), strict=True):
        block = np.ix_(own, own)
        names = list(nano.slots)
        truth = nano.gram({names[index]: expected[names[index]] for index in own})
        assert nano.gram_error(record.gram[block], truth) <= EXACT
        outside = np.ones((4, 4), dtype=bool)
        outside[block] = False
        assert np.isnan(record.gram[outside]).all()
        assert np.isnan(record.counts["num_rows"][[i for i in range(4) if i not in own]]).all()


def test_one_adapter_for_each_slot_with_an_optimizer_of_its_own(nano):
    names = list(nano.slots)
    adapters = ("zero", "one", "two", "three")
    model, batch = nano.lora(adapters=adapters), nano.shuffled(UNEVEN)
    with probes.attach(model, nano.slots, dict(zip(names, adapters, strict=True))) as scope:
        for slot, adapter in zip(names, adapters, strict=True):
            part = batch.of(slot)
            model.set_adapter(adapter)
            expected = nano.separate(model, [part], slots=[slot])
            with scope.rows(part.slots):
                loss = nano.loss(model, part)
            loss.backward()
            assert scope.waiting == (adapter,)
            own = [p for name, p in model.named_parameters() if f".{adapter}." in name]
            record = scope.step(torch.optim.SGD(own, lr=0.1))
            index = names.index(slot)
            assert record.policy == adapter
            assert record.gram[index, index] == pytest.approx(nano.gram(expected)[0, 0], rel=EXACT)
            model.zero_grad()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-3)])
def test_coarser_types_against_separate_backwards_of_the_same_type(nano, dtype, tolerance):
    model, batch = nano.lora(dtype=dtype), nano.shuffled(UNEVEN)
    expected = nano.gram(nano.separate(model, [batch]))
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        loss.backward()
        record = scope.step(sgd(model))
    assert record.gram.dtype == np.float64
    assert nano.gram_error(record.gram, expected) <= tolerance


def test_autocast_against_separate_backwards(nano):
    model, batch = nano.lora(dtype=torch.float32), nano.shuffled(UNEVEN)

    def loss(part):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nano.loss(model, part)

    expected = nano.gram(nano.separate(model, [batch], loss))
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(batch.slots):
            total = loss(batch)
        total.backward()
        record = scope.step(sgd(model))
    # Autograd rounds each weight gradient to bfloat16, the probe does not.
    assert nano.gram_error(record.gram, expected) <= 3e-3


def test_rolled_slots_are_wrong(nano):
    """Negative control: the comparison above can fail, and the sum check does not notice."""
    model, batch = nano.lora(), nano.shuffled((2, 2, 2, 2))
    expected = nano.gram(nano.separate(model, [batch]))
    with probes.attach(model, nano.slots) as scope:
        with scope.rows([*batch.slots[1:], batch.slots[0]]):
            loss = nano.loss(model, batch)
        loss.backward()
        record = scope.step(sgd(model))
    assert nano.gram_error(record.gram, expected) > 0.1
    assert scope.residuals["default"] <= EXACT
