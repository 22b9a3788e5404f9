"""A writer killed at a random moment: every step whose append had returned is readable, bit for bit."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gradscope.runfile import RunWriter, open_run

# The step goes to the pipe only after append has returned, so what the pipe holds is acknowledged.
WRITER = """
import sys
import numpy as np
from gradscope.runfile import RunWriter, UpdateRecord
path, first, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
slots = {"a/0": "a", "a/1": "a"}
writer = RunWriter(path, slots=slots, policies={"a": "p"}, resume_from_step=first - 1 if first else None)
for step in range(first, 1_000_000):
    gram = np.random.default_rng(step).normal(size=(2, 2))
    writer.append(step, UpdateRecord("p", tuple(slots), gram), metrics={"loss": gram[0, 0]})
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    if step % every == every - 1:
        writer.compact()
"""


def kill_at(path, delay, *, first=0, every=7):
    """Runs a writer for `delay` seconds after its first step; returns the last step it acknowledged."""
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline()]
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return int(whole[-1])


def check(path, acknowledged):
    run = open_run(path)
    steps = run["train"]["step"].values
    assert steps.tolist() == list(range(len(steps)))
    assert steps[-1] in (acknowledged, acknowledged + 1)  # the step in flight may have made it
    expected = np.array([np.random.default_rng(step).normal(size=(2, 2)) for step in steps])
    np.testing.assert_array_equal(run["updates"]["gram"], expected)
    np.testing.assert_array_equal(run["train"]["loss"], expected[:, 0, 0])


def kill_many(folder, num_kills, *, seed):
    rng = np.random.default_rng(seed)
    for number in range(num_kills):
        path = folder / str(number)
        delay = rng.uniform(0, 0.3)
        check(path, kill_at(path, delay, every=int(rng.integers(2, 40))))
    return path


def test_killed_at_a_few_moments(tmp_path):
    path = kill_many(tmp_path, 3, seed=0)
    num_steps = len(open_run(path)["train"]["step"])
    check(path, kill_at(path, 0.05, first=num_steps))
    last = len(open_run(path)["train"]["step"])
    slots = {"a/0": "a", "a/1": "a"}
    with RunWriter(path, slots=slots, policies={"a": "p"}, resume_from_step=last - 1):
        pass
    check(path, last - 1)


@pytest.mark.slow
def test_killed_at_forty_moments(tmp_path):
    kill_many(tmp_path, 40, seed=1)


@pytest.mark.slow
def test_killed_and_resumed_twenty_times(tmp_path):
    rng = np.random.default_rng(2)
    first = 0
    for _ in range(20):
        acknowledged = kill_at(tmp_path / "run", rng.uniform(0, 0.2), first=first, every=5)
        check(tmp_path / "run", acknowledged)
        first = int(rng.integers(0, acknowledged + 1))
    segments = open_run(tmp_path / "run")["segments"]["segment"].values
    assert segments.tolist() == list(range(20))
