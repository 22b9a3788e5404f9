"""Synthetic runs: as labelled, reproducible, and the same through a file as opened."""

import numpy as np
import pytest

from gradscope import derive, open_run, synthetic
from gradscope.errors import ConfigError, UnknownNameError


def test_the_same_seed_gives_the_same_run():
    first, truth = synthetic.make_run("capture", seed=3, num_steps=40, num_evaluations=10)
    again, same = synthetic.make_run("capture", seed=3, num_steps=40, num_evaluations=10)
    other, _ = synthetic.make_run("capture", seed=4, num_steps=40, num_evaluations=10)
    assert truth == same
    np.testing.assert_array_equal(first["updates"]["gram"], again["updates"]["gram"])
    assert not np.array_equal(first["updates"]["gram"], other["updates"]["gram"])


def test_a_written_run_is_the_made_run(tmp_path):
    truth = synthetic.write_run(tmp_path / "run", "cliff", seed=1, num_steps=30, num_evaluations=10)
    made, same = synthetic.make_run("cliff", seed=1, num_steps=30, num_evaluations=10)
    written = open_run(tmp_path / "run")
    assert truth == same
    for group, name in (("updates", "gram"), ("eval", "num_correct"), ("train", "response_tokens_mean")):
        np.testing.assert_array_equal(written[group][name], made[group][name])


def test_grams_are_products_of_vectors():
    for kind in (*synthetic.CHANGES, *synthetic.HARMLESS):
        series = synthetic.gradient_series(
            kind, roles={"a": 3, "b": 2}, num_steps=30, generator=np.random.default_rng(0)
        )
        assert series.gram.shape == (30, 5, 5)
        np.testing.assert_allclose(series.gram, series.gram.transpose(0, 2, 1), rtol=1e-12)
        smallest = np.linalg.eigvalsh(series.gram)[:, 0]
        assert (smallest > -1e-12 * np.trace(series.gram, axis1=1, axis2=2)).all()


def test_curves_are_as_labelled():
    generator = np.random.default_rng(0)
    for kind in synthetic.FALLING:
        curve = synthetic.accuracy_curve(kind, length=50, num_total=100, generator=generator)
        before = curve.accuracy[curve.onset - 1]
        assert before - curve.accuracy[-1] > 0.03
        assert before > curve.accuracy[curve.onset]
    for kind in synthetic.STEADY:
        curve = synthetic.accuracy_curve(kind, length=50, num_total=100, generator=generator)
        assert curve.onset is None
        assert (curve.num_correct <= 100).all()


def test_amplification_raises_coherence_and_size_of_the_labelled_role():
    rises = []
    for seed in range(10):
        series = synthetic.gradient_series(
            "amplification", roles={"a": 1, "b": 3}, num_steps=300, generator=np.random.default_rng(seed)
        )
        assert series.role == "b"
        kappa = derive.coherence(series.gram[:, 1:, 1:])
        rises.append(np.median(kappa[-50:]) - np.median(kappa[: series.onset]))
    assert np.mean(rises) == pytest.approx(0.325, abs=0.1)


def test_policies_and_roles_are_as_asked():
    roles = {"orchestrator": 1, "worker": 2}
    run, _ = synthetic.make_run(
        "healthy", seed=0, num_steps=9, num_evaluations=9, roles=roles, policy="isolated"
    )
    assert run["slot"].values.tolist() == ["orchestrator/0", "worker/0", "worker/1"]
    assert derive.policies(run) == ["orchestrator", "worker"]
    shared, _ = synthetic.make_run("healthy", seed=0, num_steps=9, num_evaluations=9, roles=roles)
    assert derive.policies(shared) == ["shared"]


def test_runs_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'cliff'"):
        synthetic.make_run("clif", seed=0)
    with pytest.raises(ConfigError, match="at least 9 evaluations"):
        synthetic.make_run("cliff", seed=0, num_evaluations=5)
    assert not list(tmp_path.iterdir())
