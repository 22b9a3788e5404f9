"""A training run killed at any moment is readable, and at most the step in flight is missing."""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gradscope import open_run
from gradscope.errors import RunFileError
from gradscope.train import load_config, run

SETTINGS = ("train.steps=60", "train.checkpoint_every=7", "evaluate.every=5", "evaluate.num_problems=8")
# Prints each step after `on_step`, so that what the run acknowledged is known from outside.
SCRIPT = """
import sys
from gradscope import train
config = train.load_config("voting-shared-stack_code", sys.argv[2:])
train.run(config, out=sys.argv[1], on_step=lambda report: print(report.step, flush=True))
"""


def killed_run(folder, seconds_after_first_step):
    """Starts a run, kills it that long after its first step, returns the steps it told of."""
    command = [sys.executable, "-c", SCRIPT, str(folder), *SETTINGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()), int(process.stdout.readline())]
        time.sleep(seconds_after_first_step)
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split()]
    assert process.returncode in (-signal.SIGKILL, 0)
    return told


def assert_whole(folder, told):
    opened = open_run(folder)
    steps = opened["train"]["step"].values.astype(int).tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) - max(told) in (0, 1), f"told of step {max(told)}, found {len(steps)}"
    assert set(opened["updates"]["step"].values.astype(int)) >= set(range(1, max(told) + 1))
    gram = opened["updates"]["gram"].values
    assert np.isfinite(gram).all()
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    assert abs(len(lines) - len(steps)) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_lose_at_most_the_step_in_flight(tmp_path):
    moments = random.Random(0)
    for trial in range(20):
        folder = tmp_path / f"run{trial}"
        told = killed_run(folder, moments.uniform(0.0, 6.0))
        assert_whole(folder, told)


def test_a_killed_run_is_whole_and_can_go_on(tmp_path):
    folder = tmp_path / "run"
    told = killed_run(folder, 0.7)
    assert_whole(folder, told)
    last = 2 + open_run(folder)["train"].sizes["step"]
    config = load_config("voting-shared-stack_code", [*SETTINGS, f"train.steps={last}"])
    with pytest.raises(RunFileError, match="holds a run already"):
        run(config, out=folder)
    assert run(config, out=folder, resume=True).step == last
    assert open_run(folder)["train"]["step"].values.tolist() == list(range(1, last + 1))
