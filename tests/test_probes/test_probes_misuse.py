"""Loops that would give wrong numbers without a word: each is told in one line."""

from __future__ import annotations

import gc
import math
import warnings

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn

from gradscope import RunWriter, probes
from gradscope.errors import ProbeError

TWO = ["solver/0", "judge/0"]


def adam(model):
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def test_parameters_unfrozen_after_attach_are_named_and_in_the_norm(toy):
    model = toy.model()
    model[0].requires_grad_(False)
    with probes.attach(model, toy.slots) as scope:
        model[0].requires_grad_(True)
        optimizer = adam(model)
        toy.run(scope, model, TWO)
        with pytest.warns(UserWarning, match=r"2 parameters .* only since attach\(\), .*'0.weight'"):
            record = scope.step(optimizer)
        total = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
        assert record.coverage == ("0.weight", "0.bias")
        assert record.scalars["grad_norm"] == pytest.approx(total, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
        toy.run(scope, model, TWO)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            assert scope.step(optimizer).coverage == ("0.weight", "0.bias")


def test_an_adapter_activated_after_attach_is_named(nano):
    model = nano.lora(target_modules=["q_proj"])
    with probes.attach(model, nano.slots) as scope:
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
        model.double()
        batch = nano.batch(list(nano.slots))
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch)
        loss.backward()
        with pytest.warns(UserWarning, match="only since attach"):
            record = scope.step(adam(model))
    assert len(record.coverage) == 4
    assert all(".second." in name for name in record.coverage)


def test_a_parameter_of_another_model_in_the_same_optimizer_is_its_own_affair(toy):
    model, other = toy.model(), nn.Linear(2, 1).double()
    optimizer = toy.sgd(nn.ModuleList([model, other]))
    with probes.attach(model, toy.slots) as scope:
        other(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        toy.run(scope, model, TWO)
        assert scope.step(optimizer).coverage == ()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_step_does_not_know_is_seen_when_it_steps(toy, fused):
    model = toy.model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update():
        x, y = toy.data(2)
        with scope.rows(TWO):
            loss = ((model(x.float()) - y.float()) ** 2).sum()
        scaler.scale(loss).backward()
        record = scope.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return record

    scope = probes.attach(model, toy.slots, attribution=probes.Attribution(enabled=False))
    with pytest.warns(UserWarning, match=r"scales the loss by 1024.*scaler=scaler"):
        update()
    with pytest.raises(
        ProbeError, match=r"not given the GradScaler .* scope.step\(optimizer, scaler=scaler\)"
    ):
        update()
    assert not scope.attached


def test_gradients_unscaled_before_step_agree_in_double_precision(toy):
    model = toy.model()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e4)
    with probes.attach(model, toy.slots) as scope:
        x, y = toy.data(2)
        with scope.rows(TWO):
            loss = ((model(x) - y) ** 2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scope.step(optimizer, scaler)
        assert scope.residuals["default"] <= 1e-12


def test_step_after_the_optimizer_is_refused_from_the_first_update(toy):
    model = toy.model()
    optimizer = adam(model)
    scope = probes.attach(model, toy.slots)
    toy.run(scope, model, TWO)
    optimizer.step()
    with pytest.raises(ProbeError, match=r"optimizer.step\(\) ran while policy 'default' had rows"):
        scope.step(optimizer)
    assert not scope.attached
    optimizer.step()  # no hook is left


def test_an_optimizer_of_something_else_may_step_at_any_time(toy):
    model, other = toy.model(), nn.Linear(2, 1).double()
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, TWO)
        other(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        adam(other).step()
        assert scope.step(adam(model)).gram[0, 0] > 0


def test_a_scope_that_was_forgotten_disturbs_no_optimizer(toy):
    for _ in range(2):
        model = toy.model()
        probes.attach(model, toy.slots)
        del model
        gc.collect()
    other = nn.Linear(2, 1).double()
    other(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    adam(other).step()


def test_a_record_that_is_appended_too_early_is_told_of_once(toy, tmp_path):
    model = toy.model()
    optimizer = adam(model)
    policies = dict.fromkeys(toy.slots, "default")
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, TWO)
        record = scope.step(optimizer)
        assert record.pending
        with RunWriter(tmp_path / "run", slots=toy.slots, policies=policies) as run:
            with pytest.warns(UserWarning, match=r"step 1: the record still waits for optimizer.step\(\)"):
                run.append(1, record)
            for step in (2, 3):
                optimizer.step()
                assert not record.pending
                optimizer.zero_grad()
                toy.run(scope, model, TWO)
                record = scope.step(optimizer)
                run.append(step, record)  # told of once


def test_no_record_waits_where_nothing_is_attributed(toy):
    model = toy.model()
    with probes.attach(model, toy.slots, attribution=probes.Attribution(enabled=False)) as scope:
        toy.run(scope, model, TWO)
        assert not scope.step(adam(model)).pending


def test_advantages_that_are_all_missing_are_not_zero(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, TWO, advantages=[math.nan, 0.0])
        counts = scope.step(adam(model)).counts
    assert np.isnan(counts["num_signal_rows"][0])
    assert np.isnan(counts["advantage_abs_sum"][0])
    assert counts["num_signal_rows"][1] == counts["advantage_abs_sum"][1] == 0


def test_row_ids_that_name_several_rows_are_warned_of(toy):
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        with pytest.warns(UserWarning, match="rows of one micro-batch have the same row id"):
            toy.run(scope, model, TWO * 2, row_ids=["a", "b", "a", "c"])
        assert scope.step(adam(model)).counts["num_rows"].tolist() == [2, 2]


def test_a_state_of_more_parameters_or_amid_an_update_is_refused(nano):
    large, small = nano.lora(), nano.lora(target_modules=["q_proj"])
    batch = nano.batch(list(nano.slots))
    with probes.attach(large, nano.slots) as scope:
        with scope.rows(batch.slots):
            loss = nano.loss(large, batch)
        loss.backward()
        with pytest.raises(ProbeError, match=r"state_dict\(\): policy default has rows since its last step"):
            scope.state_dict()
        optimizer = adam(large)
        scope.step(optimizer)
        optimizer.step()
        state = scope.state_dict()
    with (
        probes.attach(small, nano.slots) as scope,
        pytest.raises(ProbeError, match=r"no covered parameter '.*', of which the state has momenta"),
    ):
        scope.load_state_dict(state)


def test_rows_through_a_model_whose_adapters_were_unloaded_are_refused(nano):
    model = nano.lora()
    optimizer = adam(model)
    scope = probes.attach(model, nano.slots)
    merged = model.merge_and_unload()
    batch = nano.batch(list(nano.slots))
    with scope.rows(batch.slots):
        nano.loss(merged, batch)
    with pytest.raises(ProbeError, match=r"no longer in the model.*merged and unloaded"):
        scope.step(optimizer)


def test_a_gradient_asked_for_beside_backward_is_named_as_a_cause(toy):
    model = toy.model()
    scope = probes.attach(model, toy.slots)
    x, y = toy.data(2)
    with scope.rows(TWO):
        loss = ((model(x) - y) ** 2).sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    with pytest.raises(ProbeError, match=r"torch\.autograd\.grad"):
        scope.step(adam(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_that_are_rounding_are_not_attributed(toy, dtype):
    """Adam makes a step of full size out of rounding, in which the slots have no part."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-30)
    x = toy.data(3)[0].to(dtype)
    with probes.attach(model, toy.slots) as scope:
        with scope.rows(["solver/0"] * 6):
            loss = model(x.repeat(2, 1)).squeeze(1) @ torch.tensor(
                [1.1, 0.7, 0.3, -1.1, -0.7, -0.3], dtype=dtype
            )
        loss.backward()
        record = scope.step(optimizer)
        optimizer.step()
    assert record.scalars["update_norm"] > 0.01
    assert record.update_gram is record.effect is record.attribution_residual is None
    assert "cancel to rounding" in record.attribution_reason
