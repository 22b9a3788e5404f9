"""Packed rows: slots tagged by token, several rows in one sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope import probes
from gradscope.errors import ProbeError

UNEVEN = (3, 2, 4, 1)


def packed(nano, batch, *, reset=True):
    """The rows of a batch in one row without padding; positions start again with each if told to."""
    lengths = batch.attention.sum(1).tolist()
    ids = torch.cat([row[:n] for row, n in zip(batch.ids, lengths, strict=True)])
    weights = torch.cat(
        [torch.cat([w[: n - 1], w.new_zeros(1)]) for w, n in zip(batch.weights, lengths, strict=True)]
    )
    positions = torch.cat([torch.arange(n) for n in lengths])
    tags = [slot for slot, n in zip(batch.slots, lengths, strict=True) for _ in range(n)]
    rows = [row for row, n in enumerate(lengths) for _ in range(n)]
    same = torch.tensor(rows)[:, None] == torch.tensor(rows)[None, :]
    causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    mask = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    mask.masked_fill_(~(causal & same if reset else causal), torch.finfo(torch.float64).min)
    return (
        {
            "input_ids": ids[None],
            "position_ids": positions[None] if reset else torch.arange(len(rows))[None],
            "attention_mask": mask[None, None],
        },
        weights,
        tags,
        rows,
    )


def packed_loss(model, inputs, weights):
    logprobs = torch.log_softmax(model(**inputs).logits[0, :-1], dim=-1)
    return -(logprobs.gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1) * weights[:-1]).sum()


@pytest.mark.parametrize("full", [False, True])
def test_packed_rows_tagged_by_token(nano, full):
    batch = nano.shuffled(UNEVEN)
    model = nano.model() if full else nano.lora()
    inputs, weights, tags, rows = packed(nano, batch)

    def run(scope):
        with scope.rows(tags, row_ids=rows, tokens=[1.0] * len(tags)):
            loss = packed_loss(model, inputs, weights)
        loss.backward()

    record = nano.check(model, [batch], run=run)
    assert record.counts["num_rows"].tolist() == list(UNEVEN)
    lengths = batch.attention.sum(1)
    for index, slot in enumerate(nano.slots):
        own = sum(int(n) for n, name in zip(lengths, batch.slots, strict=True) if name == slot)
        assert record.counts["num_tokens"][index] == own


def test_packed_padding_belongs_to_no_slot(nano):
    batch, model = nano.shuffled(UNEVEN), nano.lora()
    inputs, weights, tags, _ = packed(nano, batch)
    pad = 5
    size = len(tags) + pad
    mask = torch.full((1, 1, size, size), torch.finfo(torch.float64).min, dtype=torch.float64)
    mask[..., : len(tags), : len(tags)] = inputs["attention_mask"]
    mask[..., torch.arange(len(tags), size), torch.arange(len(tags), size)] = 0
    longer = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (0, pad)),
        "position_ids": torch.nn.functional.pad(inputs["position_ids"], (0, pad)),
        "attention_mask": mask,
    }

    def run(scope):
        with scope.rows([*tags, *[None] * pad]):
            loss = packed_loss(model, longer, torch.nn.functional.pad(weights, (0, pad)))
        loss.backward()

    nano.check(model, [batch], run=run)


def test_attention_across_packed_rows_is_wrong(nano):
    """Negative control: without position ids set back, a slot's loss depends on other slots' rows."""
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    inputs, weights, tags, _ = packed(nano, batch, reset=False)
    starts = np.flatnonzero([True, *(a != b for a, b in zip(tags[1:], tags[:-1], strict=True))])
    assert len(starts) > 1
    truth = {}
    for slot in nano.slots:
        model.zero_grad()
        mask = torch.tensor([tag == slot for tag in tags])
        packed_loss(model, inputs, weights * mask).backward()
        truth[slot] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    scope = probes.attach(model, nano.slots)
    with scope.rows(tags):
        loss = packed_loss(model, inputs, weights)
    loss.backward()
    found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
    trained = {slot: {name: truth[slot][name] for name in parts} for slot, parts in found.items()}
    assert nano.gram_error(nano.gram(found), nano.gram(trained)) > 0.01
    with pytest.raises(ProbeError, match=r"attend to each other.*the attention mask lets them"):
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))


def ways_to_leak(inputs):
    ones = torch.ones_like(inputs["input_ids"])
    there = {"input_ids": inputs["input_ids"]}
    return {
        "no position_ids": there,
        "use_cache=True makes transformers ignore position_ids": there
        | {"position_ids": inputs["position_ids"]},
        "position_ids go on where the slot changes": there
        | {"use_cache": False, "position_ids": torch.arange(ones.shape[1])[None]},
        "a two-dimensional attention_mask overrides position_ids": there
        | {"position_ids": inputs["position_ids"], "attention_mask": ones},
        "cu_seq_lens has no boundary where the slot changes": there
        | {"position_ids": inputs["position_ids"], "cu_seq_lens_q": torch.tensor([0, ones.shape[1]])},
        "the attention mask lets them": there
        | {"attention_mask": torch.ones(1, 1, ones.shape[1], ones.shape[1], dtype=torch.bool).tril()},
    }


@pytest.mark.parametrize("how", list(ways_to_leak({"input_ids": torch.ones(1, 1), "position_ids": None})))
@pytest.mark.parametrize("lora", [False, True])
def test_rows_that_attend_to_other_slots_are_refused(nano, how, lora):
    model, batch = nano.lora() if lora else nano.model(), nano.shuffled(UNEVEN)
    inputs, weights, tags, _ = packed(nano, batch)
    leaking = ways_to_leak(inputs)[how]
    scope = probes.attach(model, nano.slots)
    with scope.rows(tags):
        loss = packed_loss(model, leaking, weights)
    loss.backward()
    with pytest.raises(ProbeError, match=f"attend to each other .{how}"):
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("slot", [None, "generator/1"])
def test_rows_apart_by_their_positions_are_measured(nano, slot):
    """As transformers separates them: by positions that start again. Rows of one slot may share more."""
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    inputs, weights, tags, _ = packed(nano, batch)
    inputs = {key: inputs[key] for key in ("input_ids", "position_ids")} | {"use_cache": False}
    if slot is not None:
        tags, inputs = [slot] * len(tags), {"input_ids": inputs["input_ids"]}
    truth = {}
    for name in nano.slots:
        model.zero_grad()
        mask = torch.tensor([tag == name for tag in tags])
        packed_loss(model, inputs, weights * mask).backward()
        truth[name] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    with probes.attach(model, nano.slots) as scope:
        with scope.rows(tags):
            loss = packed_loss(model, inputs, weights)
        loss.backward()
        found = {name: scope.slot_gradients(name) for name in nano.slots}
        scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert nano.gradient_error(found, truth) <= 1e-12
