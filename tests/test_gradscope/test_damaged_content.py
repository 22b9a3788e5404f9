"""Content that cannot be: the detectors that read it are skipped in one line, the others go on."""

import functools

import numpy as np
import pytest
import xarray as xr

from gradscope import diagnose, synthetic


@functools.cache
def sample():
    """A run that each test copies."""
    return synthetic.make_run("cliff", seed=2, num_steps=60, num_evaluations=20)[0]


def put(run, group, name, place, value):
    run[group][name].values[place] = value


def drop(run, group, name):
    run[group] = xr.DataTree(run[group].to_dataset(inherit=False).drop_vars(name))


def reshape(run):
    updates = run["updates"].to_dataset(inherit=False)
    run["updates"] = xr.DataTree(updates.assign(gram=updates["gram"].isel(slot_b=0, drop=True)))


@pytest.mark.parametrize(
    ("damage", "detector", "reason"),
    [
        (
            lambda run: put(run, "updates", "gram", (3, 1, 1), -1.0),
            "capture",
            "/updates/gram has a negative squared norm at update 3 (slot generator/1): damaged log?",
        ),
        (
            lambda run: put(run, "updates", "gram", (3, 1, 2), np.inf),
            "amplification",
            "/updates/gram has an infinite product at update 3 (slot generator/1 and generator/2): "
            "damaged log?",
        ),
        (
            lambda run: put(run, "updates", "gram", (3, 0, 3), 1e6),
            "capture",
            "/updates/gram has a product that differs from its mirror image at update 3 "
            "(slot generator/0 and aggregator/0): damaged log?",
        ),
        (reshape, "capture", "/updates/gram has dims (update, slot), expected (update, slot, slot_b)"),
        (lambda run: drop(run, "updates", "step"), "capture", "the run holds no /updates/step"),
        (lambda run: drop(run, "updates", "policy"), "amplification", "the run holds no /updates/policy"),
        (lambda run: drop(run, "updates", "step"), "signal", "the run holds no /updates/step"),
        (
            lambda run: put(run, "train", "violation_fraction", (5, 2), 7.0),
            "capture",
            "/train/violation_fraction is 7 at step 5 slot generator/2, not between 0 and 1: damaged log?",
        ),
        (
            lambda run: put(run, "train", "response_tokens_mean", (5, 2), -7.0),
            "capture",
            "/train/response_tokens_mean is -7 at step 5 slot generator/2, not between 0 and any number: "
            "damaged log?",
        ),
        (
            lambda run: put(run, "eval", "num_correct", 4, 401.0),
            "cliff",
            "/eval/num_correct is 401 at evaluation 4, not between 0 and 400: damaged log?",
        ),
        (
            lambda run: put(run, "eval", "num_correct", 4, 0.7),
            "cliff",
            "/eval/num_correct is 0.7 at evaluation 4, not a whole number: accuracies instead of counts?",
        ),
        (lambda run: drop(run, "eval", "step"), "cliff", "the run holds no /eval/step"),
        (
            lambda run: put(run, "updates", "num_signal_rows", (2, 0), 25.0),
            "signal",
            "/updates/num_signal_rows is 25 at update 2 slot generator/0, not between 0 and 24: damaged log?",
        ),
    ],
)
def test_the_detector_is_skipped_and_the_others_go_on(damage, detector, reason):
    run = sample().copy(deep=True)
    damage(run)
    diagnosis = diagnose(run)
    assert diagnosis.skipped[detector] == reason
    assert not diagnosis.broken
    heard = {finding.kind for finding in (*diagnosis.findings, *diagnosis.quiet)}
    assert heard >= ({"signal"} if detector != "signal" else {"cliff"}) - set(diagnosis.skipped)
    assert len(diagnosis.skipped) < 4


def test_the_diagnosis_says_where_the_log_is_damaged():
    run = sample().copy(deep=True)
    assert not any("damaged" in limit for limit in diagnose(run).limits)
    run.attrs["damage"] = "3 records are lost."
    assert diagnose(run).limits[0] == "what stood where the log is damaged: 3 records are lost"
