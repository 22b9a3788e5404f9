"""What a training run records of applied changes, and that a resumed run records the same."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from gradscope import derive, open_run
from gradscope.train import run
from gradscope.train.batch import split_rows
from gradscope.train.session import Session

ATTRIBUTED = ("update_gram", "effect", "attribution_residual", "update_norm", "decay_norm")
MEASURED = ("gram", "gram_cross", "dot_previous_update", "dot_ema", *ATTRIBUTED)
CELL = "voting-shared-stack_code"


def updates_of(folder):
    return open_run(folder)["updates"].to_dataset().load()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps with two updates each."""
    from gradscope.train import load_config

    folder = tmp_path_factory.mktemp("probing")
    settings = [
        "rollout.num_problems=4",
        "rollout.group_size=4",
        "algorithm.num_minibatches=2",
        "train.steps=4",
        "train.checkpoint_every=2",
        "evaluate.every=0",
        "optim.max_grad_norm=0.05",
        "optim.weight_decay=0.1",
    ]
    run(load_config(CELL, settings), out=folder / "whole")
    return folder, settings


def test_a_run_file_has_numbers_for_what_was_applied(trained):
    updates = updates_of(trained[0] / "whole")
    assert updates.sizes["update"] == 8
    assert updates["contributor"].values.tolist() == ["generator", "aggregator", "decay", "carried"]
    for name in MEASURED:
        first = 1 if name.startswith("dot_") else 0
        assert np.isfinite(updates[name].values[first:]).all(), name
    # Weights are float32: a change of 1e-4 of a weight of 0.1 is known to five digits.
    assert updates["attribution_residual"].values.max() < 1e-3
    total = np.sqrt(updates["update_gram"].values.sum((1, 2)))
    np.testing.assert_allclose(total, updates["update_norm"].values, rtol=1e-3)
    assert (updates["clip_factor"].values < 1).any()
    assert (updates["decay_norm"].values > 0).all()
    assert (updates["skipped"].values == 0).all()
    carried = updates["update_gram"].sel(contributor="carried", contributor_b="carried").values
    assert (carried == 0).all()


def test_shares_of_a_real_run(trained):
    opened = open_run(trained[0] / "whole")
    shares = derive.role_shares(opened, derive.policies(opened)[0])
    np.testing.assert_allclose(shares["update"].sum("contributor").values, 1, rtol=1e-9)
    # Two problems an update are few: where their halves disagree altogether there is no signal to share.
    signal = shares["signal"].dropna("step")
    assert signal.sizes["step"] > 0
    np.testing.assert_allclose(signal.sum("role").values, 1, rtol=1e-9)


def test_a_resumed_run_records_what_an_uninterrupted_one_does(trained):
    from gradscope.train import load_config

    folder, settings = trained
    half = [*settings, "optim.schedule=constant"]
    for name, steps, resume in (("part", 2, False), ("part", 4, True), ("straight", 4, False)):
        config = load_config(CELL, [*half, f"train.steps={steps}"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            run(config, out=folder / name, resume=resume)
    part, straight = updates_of(folder / "part"), updates_of(folder / "straight")
    for name in MEASURED:
        np.testing.assert_array_equal(part[name].values, straight[name].values, err_msg=name)


def test_without_the_state_of_the_probes_momentum_is_carried(trained):
    from gradscope.train import load_config

    folder, settings = trained
    config = [*settings, "optim.schedule=constant"]
    run(load_config(CELL, [*config, "train.steps=2"]), out=folder / "bare")
    (folder / "bare" / "checkpoints" / "step_000002" / "probes.pt").unlink()
    told = []
    run(
        load_config(CELL, [*config, "train.steps=3"]),
        out=folder / "bare",
        resume=True,
        on_step=lambda report: told.extend(report.events),
    )
    carried = updates_of(folder / "bare")["update_gram"].sel(contributor="carried", contributor_b="carried")
    assert (carried.values[:4] == 0).all()
    assert (carried.values[4:] > 0).all()
    assert any(kind == "momenta_lost" and "counts as carried" in message for kind, message in told)


def test_weights_are_bitwise_those_of_a_run_without_probes(small):
    def weights(*overrides):
        session = Session(small(CELL, *overrides))
        for step in (1, 2):
            session.train_step(step)
        session.close()
        return session.policies.saved_weights(session.policies.names[0])

    plain = weights("probes.enabled=false")
    for overrides in (("probes.attribution=slot",), ("probes.cross=false", "probes.attribution=none")):
        probed = weights(*overrides)
        assert all(torch.equal(plain[name], probed[name]) for name in plain)


def test_settings_reach_the_records(small):
    session = Session(small(CELL, "probes.cross=false", "probes.attribution=none"))
    record = session.train_step(1).updates[0].record
    assert record.gram_cross is record.update_gram is record.attribution_reason is None
    session.close()
    session = Session(small(CELL, "probes.attribution=slot"))
    result = session.train_step(1)
    record = result.updates[0].record
    assert record.slot_update_gram.shape == (6, 6)
    assert result.metrics["seconds"]["probes"] > 0
    session.close()


def test_a_role_that_appears_late_keeps_its_place(small):
    """The aggregator has no rows in the first update; contributors stand in the workflow's order."""
    session = Session(small(CELL))
    samples = session.train_step(1).samples
    assert split_rows(samples, session.updater.slots, max_tokens=10**6)
    early = [sample for sample in samples if sample.row.slot.startswith("generator")]
    first = session.updater.update(session.policies.names[0], early, minibatch=0, learning_rate=1e-3).record
    second = session.updater.update(
        session.policies.names[0], samples, minibatch=1, learning_rate=1e-3
    ).record
    session.close()
    assert first.update_gram.shape == second.update_gram.shape == (4, 4)
    assert np.isnan(first.effect[1]).all()
    assert np.isfinite(second.effect).all()
