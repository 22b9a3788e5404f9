"""One optimizer step: what is measured, clipped, skipped and recorded."""

import math

import numpy as np
import pytest
import torch

from gradscope.train.rewards import make_samples
from gradscope.train.rollout import Stream
from gradscope.train.session import Session, trainer_metrics


def prepared(small, *overrides, cell="voting-shared-stack_code"):
    session = Session(small(cell, *overrides))
    config = session.config
    episodes = session.play(
        session.problems(1), group_size=config.rollout.group_size, stream=Stream(0, "train", 1)
    )
    return session, make_samples(episodes, config.algorithm)


def weights_of(session):
    return {
        (name, key): value.detach().clone()
        for name in session.policies.names
        for key, value in session.policies.parameters(name).items()
    }


def test_the_gram_adds_up_to_the_gradient_and_counts_are_ours(small):
    session, samples = prepared(small)
    report = session.updater.update("shared", samples, minibatch=0, learning_rate=1e-3)
    record = report.record
    assert record.slots == tuple(session.workflow.slots)
    assert math.sqrt(record.gram.sum()) == pytest.approx(record.scalars["grad_norm"], rel=1e-5)
    mine = session.updater._unmeasured("shared", samples, token_weight_list(session, samples))
    for name, values in mine.counts.items():
        assert record.counts[name] == pytest.approx(values, rel=1e-12)
    assert record.counts["loss_weight"].sum() == pytest.approx(1, rel=1e-12)
    assert 0 < record.counts["num_signal_rows"].sum() < record.counts["num_rows"].sum() == len(samples)


def token_weight_list(session, samples):
    return [1 / (len(samples) * len(sample.row.completion_ids)) for sample in samples]


def test_the_norm_is_that_of_the_gradient_in_double_precision(small):
    session, samples = prepared(small, "optim.max_grad_norm=1e9")
    norms = []

    def measure(optimizer, *_):
        gradients = [p.grad.double().flatten() for p in optimizer.param_groups[0]["params"]]
        norms.append(float(torch.linalg.vector_norm(torch.cat(gradients))))

    session.policies.optimizers["shared"].register_step_pre_hook(measure)
    report = session.updater.update("shared", samples, minibatch=0, learning_rate=1e-3)
    assert report.record.scalars["grad_norm"] == pytest.approx(norms[0], rel=1e-12)
    assert report.record.scalars["clip_factor"] == 1


def test_clipping_is_what_the_record_says(small):
    session, samples = prepared(small, "optim.max_grad_norm=0.001", "probes.enabled=false")
    before = weights_of(session)
    optimizer = session.policies.optimizers["shared"]
    report = session.updater.update("shared", samples, minibatch=0, learning_rate=1e-3)
    scalars = report.record.scalars
    assert scalars["clip_factor"] == pytest.approx(0.001 / scalars["grad_norm"], rel=1e-3)
    moments = [optimizer.state[p]["exp_avg"] for p in session.policies.parameters("shared").values()]
    clipped = torch.cat([m.flatten() for m in moments]).norm() / 0.1
    assert float(clipped) == pytest.approx(0.001, rel=1e-3)
    assert scalars["learning_rate"] == 1e-3
    assert any(not torch.equal(value, before[key]) for key, value in weights_of(session).items())


def test_without_signal_gradients_are_zero_and_momentum_goes_on(small):
    session, samples = prepared(small)
    first = session.updater.update("shared", samples, minibatch=0, learning_rate=1e-3)
    assert first.record.scalars["grad_norm"] > 0
    quiet = [sample for sample in samples if sample.advantage == 0]
    assert quiet
    before = weights_of(session)
    report = session.updater.update("shared", quiet, minibatch=0, learning_rate=1e-3)
    present = [report.record.slots.index(slot) for slot in {sample.row.slot for sample in quiet}]
    assert (report.record.gram[np.ix_(present, present)] == 0).all()
    assert report.record.counts["num_rows"].sum() == len(quiet)
    assert report.record.counts["num_signal_rows"].sum() == 0
    assert report.record.scalars["grad_norm"] == 0
    assert report.loss == 0
    assert any(not torch.equal(value, before[key]) for key, value in weights_of(session).items())


def test_a_gradient_that_is_not_finite_is_left_out(small):
    session, samples = prepared(small)
    before = weights_of(session)
    with torch.no_grad():
        norm = session.policies.network.model.norm
        good = norm.weight.clone()
        norm.weight.fill_(math.inf)
    report = session.updater.update("shared", samples, minibatch=0, learning_rate=1e-3)
    assert report.nonfinite
    assert report.record.scalars["skipped"] == 1
    assert math.isnan(report.record.scalars["clip_factor"])
    assert all(torch.equal(value, before[key]) for key, value in weights_of(session).items())
    assert not session.policies.optimizers["shared"].state
    with torch.no_grad():
        norm.weight.copy_(good)
    session.updater.update("shared", samples, minibatch=0, learning_rate=1e-3)
    assert all(torch.isfinite(value).all() for value in weights_of(session).values())


def test_the_first_minibatch_has_ratio_one_and_later_ones_drift(small):
    session, samples = prepared(
        small, "rollout.num_problems=16", "algorithm.num_minibatches=2", "optim.learning_rate=0.05"
    )
    result = session.train_step(1)
    assert [u.record.scalars["minibatch"] for u in result.updates] == [0, 1]
    metrics = trainer_metrics(result.samples, result.updates)
    assert max(metrics["kl_rollout"].values()) < 1e-9
    assert max(metrics["kl_old"].values()) > 1e-6
    slot_of = {sample.row.id: sample.row.slot for sample in result.samples}
    passes = [
        (slot_of[row_id], tokens.num_tokens, lag)
        for lag, update in enumerate(result.updates)
        for row_id, tokens in update.tokens.items()
    ]
    assert {lag for _, _, lag in passes} == {0, 1}
    for slot, lag in metrics["policy_lag"].items():
        weights, lags = zip(*((tokens, late) for s, tokens, late in passes if s == slot), strict=True)
        assert lag == pytest.approx(np.average(lags, weights=weights), rel=1e-12)
    problems = [
        {sample.problem for sample in result.samples if sample.row.id in u.tokens} for u in result.updates
    ]
    assert problems[0] <= set(range(8))
    assert problems[1] <= set(range(8, 16))
    assert len(samples) == len(result.samples)


@pytest.mark.parametrize("cell", ["voting-shared-stack_code", "eval_opt-isolated-arithmetic"])
def test_probes_change_no_bit_of_the_weights(small, cell):
    ends = []
    for enabled in ("true", "false"):
        session = Session(
            small(cell, f"probes.enabled={enabled}", "train.steps=20", "rollout.num_problems=2")
        )
        assert session.probe.active is (enabled == "true")
        for step in range(1, 21):
            session.train_step(step)
        assert session.probe.events == []
        ends.append(weights_of(session))
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_a_failing_probe_is_put_away_and_training_goes_on_the_same(small, monkeypatch):
    plain, probed = (
        Session(small("voting-shared-stack_code", f"probes.enabled={on}")) for on in ("false", "true")
    )

    def fail(optimizer):
        raise ZeroDivisionError("planted")

    events = []
    for step in range(1, 4):
        if step == 2:
            monkeypatch.setattr(probed.probe._scope, "step", fail)
        events += [event for event in probed.train_step(step).events if event[0] == "probe_disabled"]
        result = plain.train_step(step)
    assert events == [("probe_disabled", "ZeroDivisionError: planted")]
    assert not probed.probe.active
    assert not any(module._forward_hooks for module in probed.policies.network.modules())
    assert np.isnan(result.updates[0].record.gram).all()
    theirs = weights_of(plain)
    assert all(torch.equal(value, theirs[key]) for key, value in weights_of(probed).items())


def test_one_policy_trains_bit_identically_shared_and_isolated(small):
    ends = []
    for routing in ("shared", "isolated"):
        session = Session(small(f"single-{routing}-stack_code"))
        results = [session.train_step(step) for step in range(1, 6)]
        ends.append(list(weights_of(session).values()))
        assert sum(result.metrics["episode_reward_mean"] for result in results) > 0
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
