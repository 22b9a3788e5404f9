"""Gradient norms and sketches of single rows equal one separate backward for each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope import probes
from gradscope.probes.evidence import row_sums
from gradscope.probes.evidence.sketch import sketch

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)
DIM = 32


def one_by_one(nano, model, batch):
    """Parameter name -> gradients of the rows, `[N, P]`, each by a backward of its own."""
    found = {name: [] for name, _ in model.named_parameters()}
    for row in range(len(batch.slots)):
        model.zero_grad(set_to_none=True)
        nano.loss(model, batch.take([row])).backward()
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name].append(gradient.flatten().clone())
    model.zero_grad(set_to_none=True)
    used = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.stack(rows) for name, rows in found.items() if name in used}


def measure(nano, model, batches, *, mode="auto", ids=None, **evidence):
    settings = probes.Evidence(**({"rows_every": 1, "sketch_dim": DIM} | evidence))
    names = iter(ids or range(1000))
    with probes.attach(model, nano.slots, mode=mode, evidence=settings) as scope:
        for batch in batches:
            with scope.rows(batch.slots, row_ids=[f"row {next(names)}" for _ in batch.slots]):
                loss = nano.loss(model, batch)
            loss.backward()
        record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    model.zero_grad(set_to_none=True)
    return record


def compare(found, gradients):
    norms = torch.cat(list(gradients.values()), dim=1).norm(dim=1).numpy()
    assert np.max(np.abs(found.grad_norm / norms - 1)) <= EXACT
    expected = sum(sketch(rows, name, dim=DIM, seed=0) for name, rows in gradients.items()).numpy()
    assert np.max(np.abs(found.sketch - expected)) <= EXACT * norms.max()


CASES = {
    "lora": lambda nano: nano.lora(),
    "lora with biases": lambda nano: nano.lora(
        model=nano.model(attention_bias=True), lora_bias=True, target_modules=["q_proj", "o_proj"]
    ),
    "full, tied": lambda nano: nano.model(attention_bias=True),
    "full, untied": lambda nano: nano.model(tie_word_embeddings=False),
    "lora on embeddings": lambda nano: nano.lora(
        model=nano.model(tie_word_embeddings=False), target_modules=["embed_tokens", "q_proj"]
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_norms_and_sketches(nano, case):
    model, batch = CASES[case](nano), nano.shuffled(UNEVEN)
    gradients = one_by_one(nano, model, batch)
    record = measure(nano, model, [batch])
    compare(record.rows, gradients)
    assert record.rows.row_ids == tuple(f"row {row}" for row in range(10))
    assert record.rows.slots == tuple(batch.slots)


@pytest.mark.parametrize("case", ["lora", "full, tied"])
def test_fused_layers(nano, case):
    model, batch = CASES[case](nano), nano.shuffled(UNEVEN)
    gradients = one_by_one(nano, model, batch)
    compare(measure(nano, model, [batch], mode="fused").rows, gradients)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(nano, reentrant):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    gradients = one_by_one(nano, model, batch)
    nano.checkpoint(model, reentrant=reentrant)
    model.enable_input_require_grads()
    compare(measure(nano, model, [batch]).rows, gradients)


def test_micro_batches_and_portions_make_no_difference(nano, monkeypatch):
    model, batch = nano.model(), nano.shuffled(UNEVEN)
    gradients = one_by_one(nano, model, batch)
    whole = measure(nano, model, [batch]).rows
    # A tied embedding of 19 x 16 numbers fits for all 10 rows; three rows of a 16 x 24 matrix do not.
    monkeypatch.setattr(row_sums, "LARGEST", 3100)
    parts = [[7, 1, 2], [0], [3, 4, 5, 6, 8, 9]]
    split = measure(
        nano, model, [batch.take(rows) for rows in parts], ids=[row for rows in parts for row in rows]
    ).rows
    order = [split.row_ids.index(name) for name in whole.row_ids]
    assert split.grad_norm[order] == pytest.approx(whole.grad_norm, rel=EXACT)
    assert np.max(np.abs(split.sketch[order] - whole.sketch)) <= EXACT * whole.grad_norm.max()
    compare(whole, gradients)


def test_norms_of_a_shared_parameter_too_large_to_hold_are_missing_but_sketches_are_there(nano, monkeypatch):
    model, batch = nano.model(), nano.shuffled(UNEVEN)
    gradients = one_by_one(nano, model, batch)
    monkeypatch.setattr(row_sums, "LARGEST", 1000)
    found = measure(nano, model, [batch]).rows
    assert np.isnan(found.grad_norm).all()
    expected = sum(sketch(rows, name, dim=DIM, seed=0) for name, rows in gradients.items()).numpy()
    assert np.max(np.abs(found.sketch - expected)) <= EXACT * np.abs(expected).max()


class Twice(torch.nn.Module):
    """One layer that is called two times in a pass."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3).double()

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x))).sum(-1, keepdim=True)


def test_a_layer_called_twice_is_missing_once_then_exact(toy):
    torch.manual_seed(0)
    model, slots = Twice(), ["solver/0", "judge/0", "solver/0"]
    x, y = toy.data(3)
    norms = []
    for row in range(3):
        model.zero_grad()
        ((model(x[row : row + 1]) - y[row : row + 1]) ** 2).sum().backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
    with probes.attach(model, toy.slots, evidence=probes.Evidence(rows_every=1)) as scope:
        records = []
        for _ in range(2):
            model.zero_grad()
            toy.run(scope, model, slots, row_ids=[0, 1, 2])
            records.append(scope.step(toy.sgd(model)))
    assert np.isnan(records[0].rows.grad_norm).all()
    assert np.isfinite(records[0].rows.sketch).all()
    assert records[1].rows.grad_norm == pytest.approx(norms, rel=EXACT)


def test_packed_rows(toy):
    model = toy.model()
    lengths, slots = [3, 1, 4, 2], ["solver/0", "solver/0", "judge/0", None]  # padding at the end
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    x, y = toy.data(len(rows))
    weight = torch.tensor([float(slots[row] is not None) for row in rows], dtype=torch.float64)[:, None]
    gradients = {name: [] for name, _ in model.named_parameters()}
    for row in range(3):
        model.zero_grad()
        own = torch.tensor(rows) == row
        ((model(x[own]) - y[own]) ** 2).sum().backward()
        for name, parameter in model.named_parameters():
            gradients[name].append(parameter.grad.flatten().clone())
    model.zero_grad()
    with probes.attach(model, toy.slots, evidence=probes.Evidence(rows_every=1, sketch_dim=DIM)) as scope:
        with scope.rows(
            [slots[row] for row in rows],
            problems=[None if row == 1 else f"problem {row}" for row in rows],
            row_ids=[f"row {row}" for row in rows],
            tokens=[1.0] * len(rows),
            advantages=[float("nan") if row == 1 else row - 2.0 for row in rows],
        ):
            loss = ((model(x[None])[0] - y) ** 2 * weight).sum()
        loss.backward()
        found = scope.step(toy.sgd(model)).rows
    compare(found, {name: torch.stack(own) for name, own in gradients.items()})
    assert found.row_ids == ("row 0", "row 1", "row 2")
    assert found.slots == ("solver/0", "solver/0", "judge/0")
    assert found.problems == ("problem 0", "", "problem 2")
    assert found.advantages == pytest.approx([-2.0, np.nan, 0.0], nan_ok=True)
    assert found.num_tokens.tolist() == lengths[:3]


def test_rows_that_were_spared_the_pass_have_no_gradient(nano):
    model, batch = nano.lora(), nano.shuffled((1, 1, 1, 1))
    with probes.attach(model, nano.slots, evidence=probes.Evidence(rows_every=1)) as scope:
        with scope.rows(["generator/0"], row_ids=["quiet"], advantages=[0.0]):
            pass
        with scope.rows(batch.slots, row_ids=list("abcd")):
            loss = nano.loss(model, batch)
        loss.backward()
        rows = scope.step(torch.optim.SGD(model.parameters(), lr=0.1)).rows
    assert rows.row_ids == ("quiet", "a", "b", "c", "d")
    assert rows.grad_norm[0] == 0.0
    assert not rows.sketch[0].any()
    assert (rows.grad_norm[1:] > 0).all()


def test_sketches_of_a_slot_add_up_to_the_sketch_of_its_gradient(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    expected = nano.separate(model, [batch])
    rows = measure(nano, model, [batch]).rows
    for slot, gradients in expected.items():
        total = sum(sketch(g.reshape(1, -1), name, dim=DIM, seed=0) for name, g in gradients.items())
        own = rows.sketch[[name == slot for name in rows.slots]].sum(axis=0)
        assert np.max(np.abs(own - total.numpy())) <= EXACT * float(total.norm())


def test_top_rows_of_every_update_and_all_rows_of_scheduled_ones(toy):
    model = toy.model()
    slots = ["solver/0", "judge/0"] * 3
    evidence = probes.Evidence(rows_every=2, top_rows=2, sketch_dim=8)
    with probes.attach(model, toy.slots, evidence=evidence) as scope:
        records = []
        for _ in range(3):
            model.zero_grad()
            toy.run(scope, model, slots, row_ids=list("abcdef"))
            records.append(scope.step(toy.sgd(model)))
    first, second, third = (record.rows for record in records)
    assert first.row_ids == third.row_ids == tuple("abcdef")
    assert second.sketch is None
    largest = np.argsort(-first.grad_norm)[:2]  # the weights did not move
    assert second.row_ids == tuple(first.row_ids[row] for row in largest)
    assert second.grad_norm == pytest.approx(first.grad_norm[largest], rel=EXACT)
    assert records[0].modules is not None
    assert records[1].modules is None


def test_a_loss_scale_is_taken_out_of_rows_and_modules_and_not_of_parts(toy):
    slots, found = ["solver/0", "judge/0"] * 2, []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=256.0)):
        model = toy.model()
        with probes.attach(model, toy.slots, evidence=probes.Evidence(rows_every=1)) as scope:
            optimizer = toy.sgd(model)
            x, y = toy.data(4)
            with scope.rows(slots, row_ids=range(4)):
                loss = ((model(x) - y) ** 2).sum()
            scope.evidence.components({"whole": loss})
            (loss if scaler is None else scaler.scale(loss)).backward()
            found.append(scope.step(optimizer, scaler=scaler))
    plain, scaled = found
    assert scaled.rows.grad_norm == pytest.approx(plain.rows.grad_norm, rel=EXACT)
    assert scaled.rows.sketch == pytest.approx(plain.rows.sketch, rel=EXACT)
    assert scaled.modules.grad_norm == pytest.approx(plain.modules.grad_norm, rel=EXACT)
    assert np.array_equal(scaled.components.gram, plain.components.gram)


def test_rows_without_ids_are_refused(toy):
    model = toy.model()
    with (
        probes.attach(model, toy.slots, evidence=probes.Evidence(rows_every=5)) as scope,
        pytest.raises(probes.ProbeError, match="give row_ids"),
    ):
        toy.run(scope, model, ["solver/0"])


def test_hooks_see_no_rows_and_say_so(toy):
    model = toy.model()
    with pytest.raises(probes.ProbeError, match="take another mode than 'pure'"):
        probes.attach(model, toy.slots, mode="pure", evidence=probes.Evidence(rows_every=1))
    probes.attach(model, toy.slots, mode="pure").detach()  # nothing was left on the model


def test_parameters_with_hooks_are_left_out_of_rows(toy):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), toy.unknown_layer(), torch.nn.Linear(8, 1)).double()
    x, y = toy.data(2)
    norms = []
    for row in range(2):
        model.zero_grad()
        ((model(x[row : row + 1]) - y[row : row + 1]) ** 2).sum().backward()
        norms.append(
            torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "factor" not in n])
            .norm()
            .item()
        )
    model.zero_grad()
    with pytest.warns(UserWarning, match="one slot each"):
        scope = probes.attach(model, toy.slots, evidence=probes.Evidence(rows_every=1))
    with scope:
        toy.run(scope, model, ["solver/0"] * 2, row_ids=[0, 1])
        rows = scope.step(toy.sgd(model)).rows
    assert rows.grad_norm == pytest.approx(norms, rel=EXACT)
    assert list(scope.coverage) == ["1.factor"]


def test_gradients_are_bitwise_those_of_plain_training(nano):
    model, batch = nano.lora(), nano.shuffled(UNEVEN)
    nano.loss(model, batch).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with probes.attach(model, nano.slots, evidence=probes.Evidence(rows_every=1, top_rows=2)) as scope:
        with scope.rows(batch.slots, row_ids=range(10)):
            loss = nano.loss(model, batch)
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, plain[name])
        scope.detach()
