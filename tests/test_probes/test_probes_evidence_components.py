"""Parts of a loss, each by a backward pass of its own through the same taps."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import gradscope
from gradscope import probes

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)
PARTS = ("policy", "kl", "entropy")


def parts_of(nano, model, batch, reference):
    """Policy loss, divergence from a reference and negative entropy, weighted as in one loss."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1]
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(2, batch.ids[:, 1:, None]).squeeze(2)
    mask = (batch.attention[:, 1:] * batch.attention[:, :-1]).to(chosen.dtype)
    other = reference.gather(2, batch.ids[:, 1:, None]).squeeze(2)
    difference = other - chosen
    return {
        "policy": -(chosen * batch.weights).sum(),
        "kl": 0.3 * ((difference.exp() - difference - 1) * mask).sum(),
        "entropy": 0.05 * ((logprobs.exp() * logprobs).sum(-1) * mask).sum(),
    }


def references(batches):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.log_softmax(torch.randn(*b.ids[:, 1:].shape, 19, generator=generator, dtype=torch.float64), -1)
        for b in batches
    ]


def separately(nano, model, batches, given):
    """(part, slot) -> gradients, one backward each."""
    found = {}
    for part in PARTS:
        for slot in nano.slots:
            model.zero_grad(set_to_none=True)
            for batch, reference in zip(batches, given, strict=True):
                rows = [row for row, name in enumerate(batch.slots) if name == slot]
                if rows:
                    parts_of(nano, model, batch.take(rows), reference[rows])[part].backward()
            found[part, slot] = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("halved", [False, True])
def test_products_of_parts_and_slots(nano, checkpointed, halved):
    model, batches = nano.lora(), [nano.shuffled(UNEVEN, seed=seed) for seed in range(2)]
    given = references(batches)
    truth = separately(nano, model, batches, given)
    if checkpointed:
        nano.checkpoint(model, reentrant=False)
        model.enable_input_require_grads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    problems = [f"p{row % 3}" for row in range(10)] if halved else None
    with probes.attach(model, nano.slots, evidence=probes.Evidence(rows_every=1, sketch_dim=4)) as scope:
        for batch, reference in zip(batches, given, strict=True):
            with scope.rows(batch.slots, problems, row_ids=range(10)):
                parts = parts_of(nano, model, batch, reference)
                before = torch.get_rng_state()
                scope.evidence.components(parts)
                assert torch.equal(torch.get_rng_state(), before)
                sum(parts.values()).backward()
        record = scope.step(optimizer)
    found = record.components
    assert found.components == PARTS
    expected = nano.gram(truth).reshape(3, 4, 3, 4)
    norms = np.sqrt(np.diag(nano.gram(truth))).reshape(3, 4)
    error = np.abs(found.gram - expected) / (norms[:, :, None, None] * norms)
    assert error.max() <= EXACT
    # The whole loss is their sum; Qwen3's norms round gradients to single precision, each backward anew.
    assert nano.gram_error(record.gram, found.gram.sum(axis=(0, 2))) <= 1e-6
    assert record.counts["component_norm_kl"] == pytest.approx(norms[1], rel=EXACT)
    assert record.counts["component_dot_policy_kl"] == pytest.approx(np.diagonal(expected[0, :, 1]), rel=1e-9)
    if halved:
        assert np.isfinite(record.gram_cross).any()


def test_gradients_and_rows_are_those_of_the_whole_loss_alone(nano):
    batches = [nano.shuffled(UNEVEN)]
    given, found = references(batches), []
    for ask in (False, True):
        model = nano.lora()
        with probes.attach(model, nano.slots, evidence=probes.Evidence(rows_every=1)) as scope:
            with scope.rows(batches[0].slots, row_ids=range(10)):
                parts = parts_of(nano, model, batches[0], given[0])
            if ask:
                scope.evidence.components(parts)
            sum(parts.values()).backward()
            record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
        found.append(({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, record))
    (plain, one), (asked, other) = found
    assert all(torch.equal(plain[name], asked[name]) for name in plain)
    assert np.array_equal(one.gram, other.gram)
    assert np.array_equal(one.rows.grad_norm, other.rows.grad_norm)
    assert one.components is None


def test_a_schedule_and_parts_without_gradient(nano):
    model, batch = nano.lora(), nano.shuffled((2, 0, 2, 2))
    (reference,) = references([batch])
    with probes.attach(model, nano.slots, evidence=probes.Evidence(components_every=2)) as scope:
        records = []
        for _ in range(3):
            model.zero_grad()
            with scope.rows(batch.slots):
                parts = parts_of(nano, model, batch, reference) | {"constant": torch.tensor(1.0)}
            scope.evidence.components(parts)
            sum(parts.values()).backward()
            records.append(scope.step(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert [record.components is None for record in records] == [False, True, False]
    gram = records[2].components.gram
    assert (gram[3][[0, 2, 3], 3][:, [0, 2, 3]] == 0).all()
    assert np.isnan(gram[0, 1]).all()  # a slot without rows
    assert gram[0, 0, 0, 0] > 0


def test_parts_are_in_the_run_file_by_slot(nano, tmp_path):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    (reference,) = references([batch])
    writer = gradscope.RunWriter(
        tmp_path / "run", slots=nano.slots, policies=dict.fromkeys(("generator", "aggregator"), "default")
    )
    with probes.attach(model, nano.slots) as scope, writer:
        with scope.rows(batch.slots):
            parts = parts_of(nano, model, batch, reference)
        scope.evidence.components(parts)
        sum(parts.values()).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        record = scope.step(optimizer)
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer.append(1, record)
    assert all("is kept as /user/component_" in str(one.message) for one in caught)
    stored = gradscope.open_run(tmp_path / "run")["user"]["component_dot_policy_kl"]
    assert stored.dims == ("update", "slot")
    assert stored.values[0] == pytest.approx(record.counts["component_dot_policy_kl"])


def test_refusals(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    (reference,) = references([batch])
    scope = probes.attach(model, nano.slots)
    with scope.rows(batch.slots):
        parts = parts_of(nano, model, batch, reference)
    with pytest.raises(probes.ProbeError, match="no losses"):
        scope.evidence.components({})
    with pytest.raises(probes.ProbeError, match="'policy' is no single number"):
        scope.evidence.components({"policy": torch.zeros(3)})
    scope.evidence.components(parts)
    with pytest.raises(probes.ProbeError, match="the same parts of the loss for every"):
        scope.evidence.components({"policy": parts["policy"]})
    sum(parts.values()).backward()
    with pytest.raises(probes.ProbeError, match="Call it before backward"):
        scope.evidence.components(parts)
    scope.detach()
    with pytest.raises(probes.ProbeError, match="detached"):
        scope.evidence.components(parts)


def test_reentrant_checkpointing_is_refused(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    (reference,) = references([batch])
    nano.checkpoint(model, reentrant=True)
    model.enable_input_require_grads()
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(batch.slots):
            parts = parts_of(nano, model, batch, reference)
        with pytest.raises(probes.ProbeError, match="use_reentrant=False"):
            scope.evidence.components(parts)
