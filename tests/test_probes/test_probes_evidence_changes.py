"""Changes of weights and functional influence: what optimizer steps did, against explicit recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradscope
from gradscope import probes
from gradscope.probes.evidence.influence import divergence
from gradscope.probes.evidence.modules import module_of

EXACT = 1e-10
"""What float32-free double precision leaves of sums of contributions."""
UNEVEN = (3, 2, 4, 1)
ISOLATED = {"generator": "generator", "aggregator": "aggregator"}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train(nano, scope, model, optimizers, *, steps, after_step=None):
    """Updates each policy in turn; the records of all updates."""
    records = []
    for step in range(steps):
        batch = nano.shuffled(UNEVEN, seed=step)
        for policy, optimizer in optimizers.items():
            part = batch
            if policy is not None:
                model.set_adapter(policy)
                part = batch.take([i for i, slot in enumerate(batch.slots) if nano.slots[slot] == policy])
            with scope.rows(part.slots, row_ids=range(len(part.slots))):
                loss = nano.loss(model, part)
            loss.backward()
            records.append(scope.step(optimizer))
            optimizer.step()
            optimizer.zero_grad()
            if after_step is not None:
                after_step(records[-1])
    return records


def formed(model, adapter, before, after, scaling=2.0):
    """Module -> the first-order change of its weight, formed, between two sets of parameters."""
    found = {}
    for name in before:
        if f"lora_A.{adapter}" in name:
            other = name.replace("lora_A", "lora_B")
            da, db = before[name] - after[name], before[other] - after[other]
            found[module_of(name)] = scaling * (db @ before[name] + before[other] @ da)
    return found


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_changes_of_all_contributors_add_up_to_the_change_of_the_weight(nano):
    model = nano.lora()
    states = [snapshot(model)]
    with probes.attach(model, nano.slots, evidence=probes.Evidence(modules_every=1)) as scope:
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        records = train(
            nano,
            scope,
            model,
            {None: optimizer},
            steps=3,
            after_step=lambda _: states.append(snapshot(model)),
        )
    for number, record in enumerate(records):
        assert record.attribution_residual <= EXACT
        modules = record.modules
        assert modules.contributors == ("generator", "aggregator", "decay", "carried")
        expected = formed(model, "default", states[number], states[number + 1])
        for module, gram in zip(modules.modules, modules.change_gram, strict=True):
            square = float(expected[module].square().sum())
            assert np.nansum(gram) == pytest.approx(square, rel=1e-9)
            assert (np.diag(gram)[:2] > 0).all()


def test_changes_of_two_adapters_on_one_base_have_products(nano):
    model = nano.lora(adapters=("generator", "aggregator"))
    states = []
    with probes.attach(model, nano.slots, ISOLATED, evidence=probes.Evidence(modules_every=1)) as scope:
        optimizers = {
            name: adamw([p for n, p in model.named_parameters() if f".{name}." in n]) for name in ISOLATED
        }
        states.append(snapshot(model))
        records = train(
            nano, scope, model, optimizers, steps=2, after_step=lambda _: states.append(snapshot(model))
        )
    alone, both = records[2].modules, records[3].modules
    assert alone.contributors == ("generator", "decay", "carried")
    assert both.contributors == ("aggregator", "decay", "carried", "generator")
    first = formed(model, "generator", states[2], states[3])
    second = formed(model, "aggregator", states[3], states[4])
    for module, gram in zip(both.modules, both.change_gram, strict=True):
        # The decay and the momentum carried from before count in a policy's own change.
        own = np.nansum(gram[:3, :3])
        assert own == pytest.approx(float(second[module].square().sum()), rel=1e-9)
        other = alone.change_gram[alone.modules.index(module)][0, 0]
        assert gram[3, 3] == pytest.approx(other, rel=1e-12)
        cosine = gram[0, 3] / np.sqrt(gram[0, 0] * gram[3, 3])
        truth = (first[module] * second[module]).sum() / (first[module].norm() * second[module].norm())
        assert cosine == pytest.approx(float(truth), abs=0.02)  # decay makes a hundredth of these changes


def test_changes_are_in_the_run_file_by_contributor(nano, tmp_path):
    model = nano.lora(adapters=("generator", "aggregator"))
    with (
        probes.attach(model, nano.slots, ISOLATED, evidence=probes.Evidence(modules_every=2)) as scope,
        gradscope.RunWriter(tmp_path / "run", slots=nano.slots, policies=ISOLATED) as writer,
    ):
        optimizers = {
            name: adamw([p for n, p in model.named_parameters() if f".{name}." in n]) for name in ISOLATED
        }
        records = train(nano, scope, model, optimizers, steps=3)
        for step in range(3):
            writer.append(step + 1, records[2 * step : 2 * step + 2])
    stored = gradscope.open_run(tmp_path / "run")["modules"]["change_gram"]
    assert stored.sizes["module_update"] == 4
    value = stored.isel(module_update=3).sel(contributor="aggregator", contributor_b="generator")
    assert value.values == pytest.approx(records[5].modules.change_gram[:, 0, 3], rel=1e-6)


def logits_of(nano, model, batch, *, set_adapter=False):
    def of(slot):
        if slot not in batch.slots:
            return None
        if set_adapter:
            model.set_adapter(nano.slots[slot])
        own = batch.of(slot)
        return model(input_ids=own.ids, attention_mask=own.attention).logits[own.attention.bool()]

    return of


def slow_divergence(nano, model, batch, slot, state, moved):
    """KL between the slot's next tokens under two sets of parameters, the slow way."""
    logprobs = []
    with torch.no_grad():
        for values in (state, moved):
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
            logprobs.append(torch.log_softmax(logits_of(nano, model, batch)(slot), dim=-1))
    return float((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(-1).mean())


def test_influence_of_a_shared_policy(nano):
    """One role alone moves the parameters as in a step with its gradient and the same clipping of v."""
    model = nano.lora()
    before = snapshot(model)
    batch = nano.shuffled(UNEVEN)
    gradients = nano.separate(model, [batch])
    with probes.attach(model, nano.slots, evidence=probes.Evidence(influence_every=1)) as scope:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        (record,) = train(nano, scope, model, {None: optimizer}, steps=1)
        after, randomness = snapshot(model), torch.get_rng_state()
        assert scope.evidence.influence_due == ("default",)
        scope.evidence.influence(logits_of(nano, model, batch))
        assert scope.evidence.influence_due == ()
    assert torch.equal(torch.get_rng_state(), randomness)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, after[name])
    assert record.influence.shape == (4, 4)
    roles = ("generator", "aggregator")
    for row, slot in enumerate(nano.slots):
        for column, role in enumerate(roles):
            moved = dict(before)
            for other, parts in gradients.items():
                if nano.slots[other] == role:
                    moved |= {name: moved[name] - 0.05 * g for name, g in parts.items()}
            expected = slow_divergence(nano, model, batch, slot, before, moved)
            assert record.influence[row, column] == pytest.approx(expected, rel=1e-9)
    assert record.influence[:, 2:] == pytest.approx(np.zeros((4, 2)), abs=1e-15)  # no decay, nothing carried


def test_influence_of_isolated_policies(nano):
    model = nano.lora(adapters=("generator", "aggregator"))
    batch = nano.shuffled((2, 0, 2, 2))
    with probes.attach(model, nano.slots, ISOLATED, evidence=probes.Evidence(influence_every=2)) as scope:
        optimizers = {
            name: adamw([p for n, p in model.named_parameters() if f".{name}." in n]) for name in ISOLATED
        }
        records = train(
            nano,
            scope,
            model,
            optimizers,
            steps=3,
            after_step=lambda _: scope.evidence.influence(logits_of(nano, model, batch, set_adapter=True)),
        )
    assert [record.influence is None for record in records] == [False, False, True, True, False, False]
    generator, aggregator = records[4].influence, records[5].influence
    assert (generator[[0, 2], 0] > 0).all()
    assert np.isnan(generator[1]).all()  # no prompts
    assert np.isnan(generator[3]).all()  # another policy
    assert np.isnan(generator[:, 1]).all()
    assert aggregator[3, 1] > 0
    assert np.isnan(aggregator[:3]).all()
    # Momentum carried and decay are contributors like any other.
    assert (generator[0, 2:] >= 0).all()


def test_influence_is_dropped_when_the_next_update_begins(nano):
    model = nano.lora()
    with probes.attach(model, nano.slots, evidence=probes.Evidence(influence_every=1)) as scope:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        (record,) = train(nano, scope, model, {None: optimizer}, steps=1)
        with scope.rows(["generator/0"], row_ids=[0]):
            pass
        assert scope.evidence.influence_due == ()
        scope.evidence.influence(lambda slot: pytest.fail("nothing is due"))
    assert record.influence is None


def test_divergence():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)
    p, q = torch.log_softmax(logits, dim=-1)
    truth = float((p.exp() * (p - q)).sum(-1).mean())
    assert float(divergence(*logits)) == pytest.approx(truth, rel=1e-14)
    assert float(divergence(logits[0], logits[0] + 3.0)) <= 1e-30  # the same distribution
    # Close by, KL is half the variance of the difference under p; the usual sum would be rounding.
    step = 1e-8 * torch.randn(7, 11, generator=generator, dtype=torch.float64)
    centred = step - (p.exp() * step).sum(-1, keepdim=True)
    expected = float((p.exp() * centred.square()).sum(-1).mean() / 2)
    assert float(divergence(logits[0], logits[0] + step)) == pytest.approx(expected, rel=1e-6)


def test_divergence_of_tokens_that_cannot_be():
    never = float("-inf")
    one, other = torch.tensor([[0.0, 0.0, never]]), torch.tensor([[0.0, 0.0, 0.0]])
    assert float(divergence(one, other)) == pytest.approx(np.log(1.5), rel=1e-12)
    assert float(divergence(other, one)) == np.inf


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (lambda calls: torch.zeros(3, dtype=torch.long), "expected logits"),
        (lambda calls: [0.0], "gave .0.0."),
        (lambda calls: torch.zeros(2 + calls, 5), "then"),
    ],
)
def test_wrong_logits_are_refused_and_parameters_come_back(nano, logits, message):
    model, calls = nano.lora(), []
    with probes.attach(model, nano.slots, evidence=probes.Evidence(influence_every=1)) as scope:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        train(nano, scope, model, {None: optimizer}, steps=1)
        after = snapshot(model)
        with pytest.raises(probes.ProbeError, match=message):
            scope.evidence.influence(lambda slot: (calls.append(slot), logits(len(calls)))[1])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, after[name])
