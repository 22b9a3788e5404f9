"""Norms and products module by module, changes of weights from their factors, and jumps of the norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import gradscope
from gradscope import probes
from gradscope.probes.evidence import modules
from gradscope.probes.evidence.changes import products, weight_change
from gradscope.probes.evidence.modules import module_of
from gradscope.probes.evidence.spike import FEWEST, is_spike

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)


def measured(nano, model, batch, **evidence):
    settings = probes.Evidence(modules_every=1, module_gram=True, **evidence)
    with probes.attach(model, nano.slots, evidence=settings) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        loss.backward()
        record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    model.zero_grad(set_to_none=True)
    return record


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("numbers", [modules.NUMBERS, 100])
def test_products_of_modules(nano, full, numbers, monkeypatch):
    monkeypatch.setattr(modules, "NUMBERS", numbers)
    model, batch = nano.model() if full else nano.lora(), nano.shuffled(UNEVEN)
    expected = nano.separate(model, [batch])
    record = measured(nano, model, batch)
    found = record.modules
    assert len(found.modules) == len(set(found.modules)) > 10
    for at, module in enumerate(found.modules):
        own = {
            slot: {name: g for name, g in gradients.items() if module_of(name) == module}
            for slot, gradients in expected.items()
        }
        truth = nano.gram(own)
        assert nano.gram_error(found.gram[at], truth) <= EXACT
        assert found.grad_norm[:, at] == pytest.approx(np.sqrt(np.diag(truth)), rel=EXACT)
    assert found.gram.sum(axis=0) == pytest.approx(record.gram, rel=1e-11)


def test_slots_without_rows_are_missing(nano):
    record = measured(nano, nano.lora(), nano.shuffled((2, 0, 1, 1)))
    assert np.isnan(record.modules.grad_norm[1]).all()
    assert np.isfinite(record.modules.grad_norm[[0, 2, 3]]).all()
    assert np.isnan(record.modules.gram[:, 1]).all()


@pytest.mark.parametrize(
    ("parameter", "module"),
    [
        ("base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight", "model.layers.3.mlp.up_proj"),
        ("base_model.model.model.layers.3.mlp.up_proj.lora_B.default.bias", "model.layers.3.mlp.up_proj"),
        ("base_model.model.model.embed_tokens.lora_embedding_A.default", "model.embed_tokens"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head"),
        ("base_model.model.model.norm.weight", "model.norm"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj"),
        ("module.model.norm.weight", "model.norm"),
        ("module.base_model.model.model._orig_mod.norm.weight", "model.norm"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_names_of_modules_are_those_of_the_base(parameter, module):
    assert module_of(parameter) == module


def test_modules_are_looked_at_on_schedule_and_at_a_jump(toy):
    model = toy.model()
    slots = ["solver/0", "judge/0"]
    with probes.attach(model, toy.slots, evidence=probes.Evidence(modules_every=20, rows_every=30)) as scope:
        looked, rows = [], []
        for number in range(25):
            x, y = toy.data(2)
            with scope.rows(slots, row_ids=[0, 1]):
                loss = ((model(x) - y) ** 2).sum() * (1.0 + 0.01 * (number % 3)) * (5 if number == 15 else 1)
            loss.backward()
            record = scope.step(toy.sgd(model))
            model.zero_grad()
            looked.append(record.modules is not None)
            rows.append(record.rows is not None)
    assert [number for number, there in enumerate(looked) if there] == [0, 15, 20]
    assert [number for number, there in enumerate(rows) if there] == [0, 16]


def test_schedules_and_norms_go_on_from_a_checkpoint(toy):
    def looked(scope, model, numbers):
        found = []
        for number in numbers:
            model.zero_grad()
            x, y = toy.data(2)
            with scope.rows(["solver/0"] * 2):
                loss = ((model(x) - y) ** 2).sum() * (1.0 + 0.01 * (number % 3)) * (5 if number == 15 else 1)
            loss.backward()
            found.append(scope.step(toy.sgd(model)).modules is not None)
        return found

    settings = probes.Evidence(modules_every=6)
    model = toy.model()
    with probes.attach(model, toy.slots, evidence=settings) as scope:
        whole = looked(scope, model, range(20))
    with probes.attach(model, toy.slots, evidence=settings) as scope:
        first = looked(scope, model, range(11))
        state = scope.state_dict()
    with probes.attach(model, toy.slots, evidence=settings) as scope:
        scope.load_state_dict(state)
        assert first + looked(scope, model, range(11, 20)) == whole
    assert [number for number, there in enumerate(whole) if there] == [0, 6, 12, 15, 18]


@pytest.mark.parametrize(
    ("history", "value", "spike"),
    [
        ([0.0, 0.1] * 10, 1.5, True),
        ([0.0, 0.1] * 10, 0.6, False),  # less than twice the median, though many deviations
        ([0.0, 2.0] * 10, 3.0, False),  # a history that scatters as much
        ([0.0, 0.1] * 10, -5.0, False),
        ([0.0] * FEWEST, 1.0, True),
        ([0.0] * (FEWEST - 1), 1.0, False),
        ([math.nan, -math.inf] * FEWEST, 1.0, False),
        ([0.0, 0.1] * 10, math.inf, True),
        ([0.0, 0.1] * 10, math.nan, False),
        ([9.0] * 50 + [0.0, 0.1] * 25, 2.0, True),  # only recent values count
    ],
)
def test_jumps(history, value, spike):
    assert is_spike(history, value) is spike


def random_layers(num, *, outputs=9, inputs=7, rank=3):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [
        (draw(rank, inputs), draw(outputs, rank), draw(rank, inputs), draw(outputs, rank)) for _ in range(num)
    ]


def test_products_of_weight_changes_equal_those_of_the_formed_weights():
    layers = random_layers(4)
    changes = [weight_change(*layer, scaling=0.5 * (k + 1)) for k, layer in enumerate(layers)]
    formed = [0.5 * (k + 1) * (db @ a + b @ da) for k, (a, b, da, db) in enumerate(layers)]
    flat = torch.stack([weight.flatten() for weight in formed])
    assert torch.allclose(products(changes), flat @ flat.T, rtol=EXACT, atol=EXACT)


def test_changes_of_different_rank_on_one_base():
    (first,), (second,) = random_layers(1, rank=2), random_layers(1, rank=5)
    found = products([weight_change(*first, scaling=1.0), weight_change(*second, scaling=2.0)])
    one = first[3] @ first[0] + first[1] @ first[2]
    two = 2.0 * (second[3] @ second[0] + second[1] @ second[2])
    assert float(found[0, 1]) == pytest.approx(float((one * two).sum()), rel=EXACT)


def test_changes_of_contributors_add_up():
    a, b, da, db = random_layers(1)[0]
    _, _, da2, db2 = random_layers(2)[1]
    parts = [weight_change(a, b, da, db, scaling=1.0), weight_change(a, b, da2, db2, scaling=1.0)]
    whole = weight_change(a, b, da + da2, db + db2, scaling=1.0)
    assert float(products([whole])[0, 0]) == pytest.approx(float(products(parts).sum()), rel=EXACT)


def test_evidence_of_a_record_is_in_the_run_file(nano, tmp_path):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    settings = probes.Evidence(modules_every=2, module_gram=True, rows_every=2, top_rows=1, sketch_dim=8)
    with (
        probes.attach(model, nano.slots, evidence=settings) as scope,
        gradscope.RunWriter(
            tmp_path / "run", slots=nano.slots, policies={"generator": "default", "aggregator": "default"}
        ) as writer,
    ):
        records = []
        for step in range(1, 4):
            model.zero_grad()
            with scope.rows(batch.slots, problems=["p"] * 10, row_ids=[f"{step}-{row}" for row in range(10)]):
                loss = nano.loss(model, batch)
            loss.backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            records.append(scope.step(optimizer))
            optimizer.step()
            writer.append(step, records[-1])
    run = gradscope.open_run(tmp_path / "run")
    stored = run["modules"]
    assert stored["update"].values.tolist() == [0, 2]
    assert list(run["module"].values) == list(records[0].modules.modules)
    assert stored["grad_norm"].isel(module_update=1).values == pytest.approx(
        records[2].modules.grad_norm, rel=1e-6
    )
    assert stored["gram"].isel(module_update=0).values == pytest.approx(records[0].modules.gram, rel=1e-6)
    rows = run["rows"]
    assert rows["row_id"].values.tolist() == [
        *(f"1-{row}" for row in range(10)), *records[1].rows.row_ids, *(f"3-{row}" for row in range(10)),
    ]  # fmt: skip
    assert rows["grad_norm"].values[:10] == pytest.approx(records[0].rows.grad_norm, rel=1e-15)
    assert np.isnan(rows["sketch"].values[10]).all()
    assert rows["sketch"].values[11:] == pytest.approx(records[2].rows.sketch.astype(np.float32))
    assert rows["row_slot"].values[:10].tolist() == batch.slots
    assert set(rows["problem"].values) == {"p"}
    assert rows["update"].values.tolist() == [0.0] * 10 + [1.0] + [2.0] * 10


def test_settings_are_checked():
    with pytest.raises(probes.ProbeError, match="rows_every is -1"):
        probes.Evidence(rows_every=-1)
    with pytest.raises(probes.ProbeError, match=r"sketch_dim is 2\.5"):
        probes.Evidence(sketch_dim=2.5)
