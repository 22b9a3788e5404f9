"""The first and the last fifth of a figure are those of the detectors."""

import numpy as np

from gradscope import derive
from gradscope.figures.measures import window_steps
from gradscope.runfile import RunWriter, UpdateRecord, open_run
from gradscope.stats.windows import windows_for

SLOTS = {"a/0": "a", "a/1": "a"}


def updated_from(path, first, num_steps):
    """A run that logs every step and updates from step `first` on."""
    with RunWriter(path, slots=SLOTS, policies={"a": "p"}) as writer:
        for step in range(num_steps):
            writer.append(step, UpdateRecord("p", tuple(SLOTS), np.eye(2)) if step >= first else None)
    return open_run(path)


def test_windows_are_those_of_the_detectors(tmp_path):
    run = updated_from(tmp_path, 50, 100)
    steps = derive.step_gram(run, "p")["step"].values
    windows = windows_for(steps.size)
    assert window_steps(run, "early").tolist() == steps[windows.base].tolist() == list(range(20))
    assert window_steps(run, "late").tolist() == steps[windows.final].tolist() == list(range(80, 100))


def test_a_run_too_short_for_two_windows_is_cut_into_halves(tmp_path):
    run = updated_from(tmp_path, 0, 15)
    assert window_steps(run, "early").tolist() == list(range(7))
    assert window_steps(run, "late").tolist() == list(range(8, 15))
