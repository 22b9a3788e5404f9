"""Applied contributions against optimizers written out by hand, one momentum a role."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from gradscope import probes

ROLES = ("solver", "judge")
SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge/0": "judge"}
ROWS = ["solver/0", "judge/0", "solver/1", "solver/0", "judge/0", "solver/1"]


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).to(dtype)


def data(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(6, n, generator=generator, dtype=torch.float64).to(dtype) for n in (3, 1))


def flat(tensors):
    return torch.cat([t.detach().flatten().double() for t in tensors])


def role_gradients(model, x, y):
    """One backward for each role."""
    found = []
    for role in ROLES:
        rows = [row for row, slot in enumerate(ROWS) if SLOTS[slot] == role]
        loss = ((model(x[rows]) - y[rows]) ** 2).sum()
        found.append(flat(torch.autograd.grad(loss, list(model.parameters()))))
    return torch.stack(found)


class Hand:
    """Adam, AdamW and SGD as their papers have them, with a momentum of its own for each of four parts."""

    def __init__(self, kind, size, **settings):
        self.kind, self.s, self.t = kind, settings, 0
        self.m, self.v, self.top = torch.zeros(4, size).double(), torch.zeros(size).double(), None
        self.first = True

    def step(self, gradients, theta):
        """Contributions of solver, judge, decay and what was carried, `[4, P]`."""
        s, sign = self.s, -1.0 if self.s.get("maximize") else 1.0
        decay = s.get("weight_decay", 0.0)
        coupled = decay if self.kind != "AdamW" else 0.0
        e = torch.cat([sign * gradients, (coupled * theta)[None], torch.zeros_like(theta)[None]])
        self.t += 1
        if self.kind == "SGD":
            mu = s.get("momentum", 0.0)
            if mu == 0:
                return s["lr"] * e
            self.m = e.clone() if self.first else mu * self.m + (1 - s.get("dampening", 0.0)) * e
            self.first = False
            return s["lr"] * (e + mu * self.m if s.get("nesterov") else self.m)
        b1, b2 = s.get("betas", (0.9, 0.999))
        self.m = b1 * self.m + (1 - b1) * e
        self.v = b2 * self.v + (1 - b2) * e.sum(0) ** 2
        v = self.v
        if s.get("amsgrad"):
            self.top = v if self.top is None else torch.maximum(self.top, v)
            v = self.top
        u = s["lr"] * (self.m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + s.get("eps", 1e-8))
        if self.kind == "AdamW":
            u[2] += s["lr"] * decay * theta
        return u


CASES = {
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw maximize amsgrad": (
        "AdamW",
        {"lr": 1e-2, "weight_decay": 0.1, "maximize": True, "amsgrad": True, "betas": (0.8, 0.95)},
    ),
    "adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.0}),
    "adam coupled decay": ("Adam", {"lr": 1e-2, "weight_decay": 0.2}),
    "sgd": ("SGD", {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd nesterov maximize": ("SGD", {"lr": 1e-3, "momentum": 0.8, "nesterov": True, "maximize": True}),
    "sgd nesterov": ("SGD", {"lr": 1e-2, "momentum": 0.8, "nesterov": True}),
}
WAYS = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_contributions_equal_those_worked_out_by_hand(case, way):
    kind, settings = CASES[case]
    model = network()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings, **WAYS[way])
    hand = Hand(kind, sum(p.numel() for p in model.parameters()), **settings)
    with probes.attach(model, SLOTS) as scope:
        previous = None
        for step in range(6):
            x, y = data(step)
            gradients = role_gradients(model, x, y)
            with scope.rows(ROWS):
                loss = ((model(x) - y) ** 2).sum()
            loss.backward()
            record = scope.step(optimizer)
            assert record.update_gram is record.effect is record.attribution_residual is None
            bound = 0.7 * float(flat(p.grad for p in model.parameters()).norm()) if step % 2 else 1e9
            torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
            factor = float(flat(p.grad for p in model.parameters()).norm() / gradients.sum(0).norm())
            before = flat(model.parameters())
            expected = hand.step(factor * gradients, before)
            optimizer.step()
            applied = before - flat(model.parameters())
            assert float((expected.sum(0) - applied).norm() / applied.norm()) <= 1e-12
            products = (expected @ expected.T).numpy()
            scale = np.abs(products).max()
            np.testing.assert_allclose(record.update_gram, products, atol=1e-11 * scale, rtol=1e-10)
            effects = (gradients @ expected.T).numpy()
            np.testing.assert_allclose(record.effect, effects, atol=1e-11 * np.abs(effects).max(), rtol=1e-10)
            assert record.attribution_residual <= 1e-10
            assert record.attribution_reason is None
            assert record.scalars["update_norm"] == pytest.approx(float(applied.norm()), rel=1e-12)
            assert record.scalars["decay_norm"] == pytest.approx(float(expected[2].norm()), rel=1e-10)
            assert record.scalars["clip_factor"] == pytest.approx(factor, rel=1e-10)
            assert record.scalars["skipped"] == 0
            dots = record.counts["dot_previous_update"]
            if previous is None:
                assert np.isnan(dots).all()
            else:
                of_roles = (gradients @ previous).numpy()
                np.testing.assert_allclose([dots[:2].sum(), dots[2]], of_roles, rtol=1e-9)
            previous = applied
            optimizer.zero_grad()
    assert scope.attribution_reasons == {}


def test_running_mean_of_the_gradient():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, maximize=True)
    with probes.attach(model, SLOTS) as scope:
        for step in range(3):
            x, y = data(step)
            gradients = role_gradients(model, x, y)
            mean = [-optimizer.state[p]["exp_avg"] for p in model.parameters()] if step else None
            expected = None if mean is None else (gradients @ flat(mean)).numpy()
            with scope.rows(ROWS):
                ((model(x) - y) ** 2).sum().backward()
            record = scope.step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            dots = record.counts["dot_ema"]
            if expected is None:
                assert np.isnan(dots).all()
            else:
                np.testing.assert_allclose([dots[:2].sum(), dots[2]], expected, rtol=1e-10)


def train(model, optimizer, scope, steps, *, clip=1.0, signal=None, rows=ROWS):
    """Steps with several micro-batches; the gradient is exactly zero where `signal` says so."""
    records = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        for part in range(2):
            x, y = data(1000 * part + step, dtype)
            weight = 1.0 if signal is None or signal(step) else 0.0
            with scope.rows(rows, problems=[0, 1, 2, 0, 1, 2]):
                loss = weight * ((model(x) - y) ** 2).sum()
            loss.backward()
        record = scope.step(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        records.append(record)
    return records


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_fifty_steps_with_clipping_and_steps_without_gradient_add_up(dtype, bound, kind):
    model = network(dtype)
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, weight_decay=0.05, **settings)
    with probes.attach(model, SLOTS) as scope:
        records = train(model, optimizer, scope, range(50), signal=lambda step: step % 10 != 7)
    # The change is known only as precisely as the weights are stored, whatever the contributions.
    stored = torch.finfo(dtype).eps / 2 * float(flat(model.parameters()).norm())
    for record in records:
        assert record.attribution_residual <= bound + stored / record.scalars["update_norm"]
    assert np.median([record.attribution_residual for record in records]) <= bound
    for record in records:
        total = record.update_gram.sum()
        assert math.sqrt(total) == pytest.approx(record.scalars["update_norm"], rel=10 * bound)
    quiet = [record for step, record in enumerate(records) if step % 10 == 7]
    assert len(quiet) == 5
    for record in quiet:
        assert (record.gram == 0).all()
        # What moves is momentum of earlier steps, of the roles that made it.
        moved = np.sqrt(np.diag(record.update_gram))
        assert (moved[:2] > 0.01 * record.scalars["update_norm"]).all()
        assert moved[3] == 0


def test_movement_before_the_probe_is_carried():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = data(step)
        ((model(x) - y) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with probes.attach(model, SLOTS) as scope:
        records = train(model, optimizer, scope, range(3, 30))
        assert all(record.attribution_residual <= 1e-10 for record in records)
    carried = [math.sqrt(record.update_gram[3, 3]) for record in records]
    assert carried[0] > 0.1 * records[0].scalars["update_norm"]
    assert carried[-1] < 0.1 * carried[0]
    assert carried[-1] > 0


def test_groups_with_settings_of_their_own_and_parameters_outside():
    """One covered parameter is not in the optimizer, one of the optimizer's is not in the model."""
    model = network()
    names = dict(model.named_parameters())
    outside = nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [
        {"params": [names["0.weight"], outside], "lr": 1e-2, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"params": [names["3.weight"], names["3.bias"]], "lr": 3e-3, "weight_decay": 0.0, "eps": 1e-3},
        {"params": [names["2.weight"], names["0.bias"]], "lr": 1e-3, "amsgrad": True},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    with probes.attach(model, SLOTS) as scope:
        for step in range(8):
            x, y = data(step)
            gradients = role_gradients(model, x, y)
            with scope.rows(ROWS):
                loss = ((model(x) - y) ** 2).sum() + outside.square().sum()
            loss.backward()
            before = flat(model.parameters())
            record = scope.step(optimizer)
            optimizer.step()
            applied = before - flat(model.parameters())
            assert record.attribution_residual <= 1e-10
            assert record.scalars["update_norm"] == pytest.approx(float(applied.norm()), rel=1e-10)
            np.testing.assert_allclose(
                record.effect.sum(1), (gradients @ applied).numpy(), rtol=1e-8, atol=1e-12
            )
            optimizer.zero_grad()
            model.zero_grad()


def test_parameters_of_different_age():
    """A parameter without gradient is left alone, and is younger ever after."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with probes.attach(model, SLOTS) as scope:
        for step in range(9):
            model[0].weight.requires_grad_(step % 3 != 1)
            x, y = data(step)
            with scope.rows(ROWS):
                ((model(x) - y) ** 2).sum().backward()
            record = scope.step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert record.attribution_residual <= 1e-10
    ages = {int(state["step"]) for state in optimizer.state.values()}
    assert ages == {6, 9}


def test_momenta_by_slot():
    model, twin = network(), network()
    records = {}
    for by, net in (("slot", model), ("role", twin)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
        with probes.attach(net, SLOTS, attribution=probes.Attribution(by=by)) as scope:
            records[by] = train(net, optimizer, scope, range(5))[-1]
    found, expected = records["slot"], records["role"]
    np.testing.assert_allclose(found.update_gram, expected.update_gram, rtol=1e-9, atol=1e-20)
    np.testing.assert_allclose(found.effect, expected.effect, rtol=1e-9, atol=1e-20)
    assert expected.slot_update_gram is expected.slot_effect is None
    assert found.slot_update_gram.shape == (5, 5)
    assert found.slot_effect.shape == (3, 5)
    assert found.slot_update_gram[:2, :2].sum() == pytest.approx(expected.update_gram[0, 0], rel=1e-9)
    assert found.slot_effect[:2, :2].sum() == pytest.approx(expected.effect[0, 0], rel=1e-9)


def test_momenta_in_bfloat16():
    model, twin = network(torch.float32), network(torch.float32)
    found = {}
    for precision, net in (("bfloat16", model), ("parameter", twin)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with probes.attach(net, SLOTS, attribution=probes.Attribution(precision=precision)) as scope:
            found[precision] = train(net, optimizer, scope, range(10))[-1]
    assert 1e-5 < found["bfloat16"].attribution_residual < 1e-2
    np.testing.assert_allclose(
        found["bfloat16"].update_gram[:2, :2], found["parameter"].update_gram[:2, :2], rtol=0.05
    )


def test_a_role_without_rows_still_moves_by_its_momentum():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with probes.attach(model, SLOTS) as scope:
        train(model, optimizer, scope, range(3))
        record = train(model, optimizer, scope, range(3, 4), rows=["solver/0"] * 6)[0]
    assert record.update_gram[1, 1] > 0
    assert np.isnan(record.effect[1]).all()
    assert np.isfinite(record.effect[0]).all()
    assert np.isnan(record.counts["dot_previous_update"][1:]).all()
    assert record.attribution_residual <= 1e-10


def test_settings_are_checked():
    with pytest.raises(probes.ProbeError, match=r"Attribution\(by='agent'\): allowed are role, slot"):
        probes.Attribution(by="agent")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with probes.attach(model, SLOTS, attribution=probes.Attribution(enabled=False)) as scope:
        record = train(model, optimizer, scope, range(1))[0]
    assert record.update_gram is record.attribution_residual is record.attribution_reason is None
    assert not optimizer._optimizer_step_pre_hooks
