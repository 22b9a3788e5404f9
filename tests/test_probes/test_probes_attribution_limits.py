"""When a change cannot be attributed, or not yet: reasons, resumes, skipped steps, loss scales, memory."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gradscope import probes

SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge/0": "judge"}
ROWS = ["solver/0", "judge/0", "solver/1", "solver/0", "judge/0", "solver/1"]
PROBLEMS = [0, 1, 2, 0, 1, 2]


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).to(dtype)


def data(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(6, n, generator=generator, dtype=torch.float64).to(dtype) for n in (3, 1))


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1} | settings)


def backward(scope, model, step, *, scale=lambda loss: loss):
    x, y = data(step, next(model.parameters()).dtype)
    with scope.rows(ROWS, problems=PROBLEMS):
        loss = ((model(x) - y) ** 2).sum()
    scale(loss).backward()


def update(scope, model, optimizer, step):
    optimizer.zero_grad()
    backward(scope, model, step)
    record = scope.step(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return record


def assert_equal(found, expected):
    for name in ("gram", "gram_cross", "update_gram", "effect", "attribution_residual"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert found.scalars == expected.scalars
    for name, counts in expected.counts.items():
        np.testing.assert_array_equal(found.counts[name], counts, err_msg=name)


@pytest.mark.parametrize("by", ["role", "slot"])
def test_a_resumed_run_attributes_as_one_that_was_not_interrupted(by):
    settings = probes.Attribution(by=by)
    model = network()
    optimizer = adamw(model)
    whole, saved = [], None
    with probes.attach(model, SLOTS, attribution=settings) as scope:
        for step in range(8):
            whole.append(update(scope, model, optimizer, step))
            if step == 3:
                file = io.BytesIO()
                states = (model.state_dict(), optimizer.state_dict(), scope.state_dict())
                torch.save(states, file)
                saved = file.getvalue()
    weights, moments, measured = torch.load(io.BytesIO(saved), weights_only=True)
    again = network()
    again.load_state_dict(weights)
    optimizer = adamw(again)
    optimizer.load_state_dict(moments)
    with probes.attach(again, SLOTS, attribution=settings) as scope:
        scope.load_state_dict(measured)
        for step in range(4, 8):
            assert_equal(update(scope, again, optimizer, step), whole[step])


def test_without_its_state_a_resumed_run_carries_the_momentum():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        for step in range(4):
            update(scope, model, optimizer, step)
    with probes.attach(model, SLOTS) as scope:
        record = update(scope, model, optimizer, 4)
    assert record.update_gram[3, 3] > 0
    assert record.attribution_residual <= 1e-10


def test_a_state_of_something_else_is_refused():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        update(scope, model, optimizer, 0)
        state = scope.state_dict()
    scope = probes.attach(model, dict.fromkeys(SLOTS, "solver"))
    with pytest.raises(probes.ProbeError, match="has the parts solver, the state has solver, judge"):
        scope.load_state_dict(state)
    scope.detach()
    other = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 1)).double()
    with probes.attach(other, SLOTS) as scope:
        with pytest.raises(probes.ProbeError, match="does not fit the model"):
            scope.load_state_dict(state)
        state["attribution"] = {"another": state["attribution"]["default"]}
        with pytest.raises(probes.ProbeError, match="unknown policy 'another'"):
            scope.load_state_dict(state)
        assert update(scope, other, adamw(other), 0).attribution_residual <= 1e-10


class Unknown(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("make", [Unknown, torch.optim.RMSprop])
def test_an_unknown_optimizer_has_no_attribution(make):
    model = network()
    optimizer = make(model.parameters(), lr=1e-2)
    with probes.attach(model, SLOTS) as scope:
        record = update(scope, model, optimizer, 0)
        assert record.update_gram is record.effect is record.attribution_residual is None
        assert make.__name__ in record.attribution_reason
        assert scope.attribution_reasons == {"default": record.attribution_reason}
    assert record.gram[0, 0] > 0


def test_a_gradient_altered_otherwise_is_not_attributed_and_its_momentum_is_carried():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        records = []
        for step in range(5):
            optimizer.zero_grad()
            backward(scope, model, step)
            records.append(scope.step(optimizer))
            if step == 2:
                model[0].weight.grad.mul_(0.5)
            optimizer.step()
    assert "altered by more than a factor" in records[2].attribution_reason
    assert records[2].update_gram is records[2].attribution_residual is None
    assert records[2].scalars["update_norm"] > 0
    for record in records[:2]:
        assert record.update_gram[3, 3] == 0
    for record in records[3:]:
        assert record.attribution_reason is None
        assert record.attribution_residual <= 1e-10
        assert record.update_gram[3, 3] > 0
    assert scope.attribution_reasons == {}


def test_a_gradient_multiplied_by_a_negative_factor_is_attributed():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        backward(scope, model, 0)
        record = scope.step(optimizer)
        for parameter in model.parameters():
            parameter.grad.mul_(-0.25)
        optimizer.step()
    assert record.scalars["clip_factor"] == pytest.approx(-0.25, rel=1e-12)
    assert record.attribution_residual <= 1e-10


def test_a_step_with_a_closure_is_not_attributed():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        update(scope, model, optimizer, 0)
        optimizer.zero_grad()
        backward(scope, model, 1)
        record = scope.step(optimizer)
        optimizer.step(lambda: 0.0)
        after = update(scope, model, optimizer, 2)
    assert "closure" in record.attribution_reason
    assert record.update_gram is None
    assert after.attribution_residual <= 1e-10
    assert after.update_gram[3, 3] > 0


def test_the_same_optimizer_state_loaded_again_changes_nothing():
    records = []
    for loaded in (False, True):
        model = network()
        optimizer = adamw(model)
        with probes.attach(model, SLOTS) as scope:
            update(scope, model, optimizer, 0)
            if loaded:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            records.append(update(scope, model, optimizer, 1))
    assert_equal(*records)


def test_a_changed_optimizer_state_is_carried():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        update(scope, model, optimizer, 0)
        for moments in optimizer.state.values():
            moments["exp_avg"].mul_(3.0)
        records = [update(scope, model, optimizer, step) for step in (1, 2)]
    for record in records:
        assert record.attribution_residual <= 1e-10
    assert records[0].update_gram[3, 3] > records[0].update_gram[1, 1]


def test_a_step_that_is_left_out_changes_nothing():
    model, twin = network(), network()
    optimizer, other = adamw(model), adamw(twin)
    with probes.attach(model, SLOTS) as scope, probes.attach(twin, SLOTS) as plain:
        update(scope, model, optimizer, 0)
        update(plain, twin, other, 0)
        optimizer.zero_grad()
        backward(scope, model, 1)
        skipped = scope.step(optimizer)
        assert "skipped" not in skipped.scalars
        found, expected = update(scope, model, optimizer, 2), update(plain, twin, other, 2)
    assert skipped.scalars["skipped"] == 1
    assert skipped.attribution_reason == "the optimizer did not step"
    assert skipped.update_gram is None
    assert_equal(found, expected)


def test_one_optimizer_of_two_policies(nano):
    """The judge's policy has no rows in the second update; its parameters move by their momentum or rest."""
    for zeroed in (False, True):
        model = nano.lora(adapters=["one", "two"])
        optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora_" in n], lr=1e-2)
        policies = {"generator": "one", "aggregator": "two"}
        with probes.attach(model, nano.slots, policies) as scope:

            def forward(policy, slots, seed, *, model=model, scope=scope):
                model.set_adapter(policy)
                batch = nano.batch(slots, seed=seed)
                with scope.rows(batch.slots):
                    loss = nano.loss(model, batch)
                loss.backward()

            for seed in range(3):
                optimizer.zero_grad(set_to_none=not zeroed)
                forward("one", ["generator/0", "generator/1"], seed)
                if seed != 1:
                    forward("two", ["aggregator/0"] * 2, seed)
                records = scope.step(optimizer)
                optimizer.step()
                assert [record.policy for record in records] == (["one", "two"] if seed != 1 else ["one"])
                assert all(record.attribution_residual <= 1e-10 for record in records)
        of_a, of_b = records
        assert np.isnan(of_a.update_gram[1]).all()
        assert np.isfinite(of_a.update_gram[[0, 2, 3], 0]).all()
        assert np.isnan(of_b.update_gram[0]).all()
        assert np.isfinite(of_b.effect[1, 1:]).all()
        assert np.isnan(of_b.effect[0]).all()


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_leaves_no_trace(unscaled_before, fused):
    records = {}
    for scaled in (False, True):
        model = network(torch.float32)
        optimizer = adamw(model, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        found = records[scaled] = []
        with probes.attach(model, SLOTS) as scope:
            for step in range(3):
                optimizer.zero_grad()
                backward(scope, model, step, scale=scaler.scale)
                if unscaled_before:
                    scaler.unscale_(optimizer)
                found.append(scope.step(optimizer, scaler))
                if unscaled_before:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
    for plain, scaled in zip(*records.values(), strict=True):
        np.testing.assert_allclose(scaled.gram, plain.gram, rtol=1e-5)
        np.testing.assert_allclose(scaled.update_gram, plain.update_gram, rtol=1e-4, atol=1e-12)
        np.testing.assert_allclose(scaled.effect, plain.effect, rtol=1e-4, atol=1e-9)
        assert scaled.attribution_residual <= 2e-5
        assert scaled.scalars["grad_norm"] == pytest.approx(plain.scalars["grad_norm"], rel=1e-5)
        assert scaled.scalars["clip_factor"] == pytest.approx(plain.scalars["clip_factor"], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_leaves_out(fused):
    model = network(torch.float32)
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    records = []
    with probes.attach(model, SLOTS) as scope:
        for step in range(3):
            optimizer.zero_grad()
            size = math.inf if step == 1 else 1.0
            backward(scope, model, step, scale=lambda loss, size=size: scaler.scale(loss * size))
            records.append(scope.step(optimizer, scaler))
            scaler.step(optimizer)
            scaler.update()
    assert [record.scalars["skipped"] for record in records] == [0, 1, 0]
    assert records[1].update_gram is None
    assert records[2].attribution_residual <= 2e-5
    assert records[2].update_gram[3, 3] == 0


def test_memory_is_what_is_said():
    """Float32 numbers: K of the Gram, K of the cross products, one momentum a role, the parameters before."""
    model = network(torch.float32)
    size = sum(p.numel() for p in model.parameters())
    with probes.attach(model, SLOTS) as scope:
        optimizer = adamw(model)
        for step in range(2):
            update(scope, model, optimizer, step)
        num_slots, num_roles = len(SLOTS), 2
        allowed = 2 * num_slots + num_roles + 2
        assert scope.num_bytes == 4 * size * (2 * num_slots + num_roles + 1)
        assert scope.num_bytes <= 1.1 * 4 * size * allowed
    with probes.attach(model, SLOTS, attribution=probes.Attribution(enabled=False)) as scope:
        x, _ = data(0, torch.float32)
        with scope.rows(ROWS):
            model(x).sum().backward()
        assert scope.num_bytes == 4 * size * num_slots


def test_carried_momentum_is_dropped_when_nothing_is_left():
    model = network()
    optimizer = adamw(model, betas=(0.5, 0.9))
    ((model(data(0)[0])) ** 2).sum().backward()
    optimizer.step()
    with probes.attach(model, SLOTS) as scope:
        update(scope, model, optimizer, 0)
        with_carried = scope.num_bytes
        for step in range(1, 70):
            record = update(scope, model, optimizer, step)
        assert scope.num_bytes < with_carried
    assert record.update_gram[3, 3] == 0
    assert record.attribution_residual <= 1e-10


def test_hooks_are_gone_after_detach():
    model = network()
    optimizer = adamw(model)
    scope = probes.attach(model, SLOTS)
    update(scope, model, optimizer, 0)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    scope.detach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    optimizer.step()


def test_an_optimizer_is_let_go():
    model = network()
    with probes.attach(model, SLOTS) as scope:
        optimizer = adamw(model)
        update(scope, model, optimizer, 0)
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
        assert update(scope, model, adamw(model), 1).attribution_residual <= 1e-10


def test_what_goes_wrong_in_a_hook_is_a_reason_and_not_an_error():
    model = network()
    optimizer = adamw(model)
    with probes.attach(model, SLOTS) as scope:
        update(scope, model, optimizer, 0)
        optimizer.zero_grad()
        backward(scope, model, 1)
        record = scope.step(optimizer)
        kept = optimizer.state[model[0].weight].pop("exp_avg_sq")
        optimizer.state[model[0].weight]["exp_avg_sq"] = kept[:0]
        with pytest.raises(RuntimeError):
            optimizer.step()  # torch's own complaint
        optimizer.state[model[0].weight]["exp_avg_sq"] = kept
        optimizer.zero_grad()
        assert update(scope, model, optimizer, 2).attribution_residual <= 1e-10
    assert record.attribution_reason is not None
