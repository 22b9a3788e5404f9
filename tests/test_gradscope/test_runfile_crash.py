"""A writer killed at a random moment: every step whose append had returned is readable, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}
MODULES = [f"layers.{n}.m" for n in range(20)]

# Forks writers, so that hundreds start in no time. A writer notes a step in the file of acknowledgements only
# after append has returned.
SERVER = """
import json, os, sys
import numpy as np
from gradscope.runfile import RunWriter, UpdateRecord, log
import gradscope.runfile.compaction, gradscope.runfile.compaction_child

def write(order):
    acknowledged = os.open(order["acknowledged"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if order["child"]:
        log.WORTH_A_CHILD = 0
    first, slots = order["first"], order["slots"]
    resume = first - 1 if first else None
    writer = RunWriter(order["path"], slots=slots, policies={"a": "p"}, resume_from_step=resume)
    segment = writer._recorder._segment
    for step in range(first, 1_000_000):
        rng = np.random.default_rng([step, segment])
        gram = rng.normal(size=(2, 2))
        writer.append(step, UpdateRecord("p", tuple(slots), gram), metrics={"loss": gram[0, 0]})
        os.write(acknowledged, step.to_bytes(8, "little"))
        norms = rng.random((2, 20))
        writer.append_modules(step, slots=list(slots), modules=order["modules"], grad_norm=norms)
        if step % order["every"] == order["every"] - 1:
            writer.compact()

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        write(json.loads(line))
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@contextmanager
def server():
    """Yields a function that kills a writer some seconds after its `least`-th step and returns the steps it
    acknowledged; with none to wait for it may die before it has begun.
    """
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def kill_at(path, delay, *, least=0, first=0, every=7, child=False):
            acknowledged = path.with_name(f"{path.name}.acknowledged")
            acknowledged.unlink(missing_ok=True)
            order = {
                "path": str(path), "first": first, "every": every, "child": child, "slots": SLOTS,
                "modules": MODULES, "acknowledged": str(acknowledged),
            }  # fmt: skip
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            pid = int(process.stdout.readline())
            deadline = time.monotonic() + 120
            while least and not (acknowledged.exists() and acknowledged.stat().st_size >= 8 * least):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            assert process.stdout.readline() == "ended\n"
            data = acknowledged.read_bytes() if acknowledged.exists() else b""
            return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]

        yield kill_at
        process.stdin.close()


def expected(step, segment):
    rng = np.random.default_rng([step, segment])
    return rng.normal(size=(2, 2)), rng.random((2, 20)).astype("f4")


def check(path, acknowledged, *, kept=0):
    """Checks that nothing acknowledged is lost, nor any of the `kept` steps that were there before."""
    try:
        run = open_run(path)
    except RunFileError:
        assert not acknowledged
        assert not kept
        return
    assert "damage" not in run.attrs
    steps = run["train"]["step"].values if "train" in run else np.arange(0)
    assert steps.tolist() == list(range(len(steps)))
    assert set(acknowledged) <= set(steps.tolist())
    assert len(steps) >= kept
    if acknowledged:
        assert steps[-1] - acknowledged[-1] in (0, 1)  # the step in flight may have made it
    if not len(steps):
        return
    gram, loss = run["updates"]["gram"].values, run["train"]["loss"].values
    segments = run["train"]["segment"].values
    for step, segment in zip(steps, segments, strict=True):
        own_gram, _ = expected(step, segment)
        np.testing.assert_array_equal(gram[step], own_gram)
        assert loss[step] == own_gram[0, 0]
    # A record of its own, which a kill may have kept from a step.
    modules = run["modules"] if "modules" in run else {"step": np.arange(0), "grad_norm": np.empty(0)}
    assert set(acknowledged[:-1]) <= set(np.asarray(modules["step"]).tolist())
    for step, norms in zip(np.asarray(modules["step"]), np.asarray(modules["grad_norm"]), strict=True):
        np.testing.assert_array_equal(norms, expected(step, segments[step])[1])


def preloaded(path, num):
    """Writes a run of `num` steps as `SERVER` does."""
    with RunWriter(path, slots=SLOTS, policies=POLICIES) as writer:
        for step in range(num):
            gram, norms = expected(step, 0)
            writer.append(step, UpdateRecord("p", tuple(SLOTS), gram), metrics={"loss": gram[0, 0]})
            writer.append_modules(step, slots=list(SLOTS), modules=MODULES, grad_norm=norms)
    return path


def kill_many(folder, num_kills, *, seed):
    """Kills writers of new runs, of long runs that go on, and of runs that do little but compact."""
    rng = np.random.default_rng(seed)
    source = preloaded(folder / "source", 300)
    num_acknowledged = 0
    with server() as kill_at:
        for number in range(num_kills):
            path = folder / str(number)
            state = ("fresh", "preloaded", "compacting")[number % 3]
            if state != "fresh":
                shutil.copytree(source, path)
            first = 0 if state == "fresh" else int(rng.integers(200, 301))
            steps = kill_at(
                path,
                rng.uniform(0, 0.15 if state != "compacting" else 0.5),
                least=int(rng.integers(20, 60)) if number % 2 else 0,
                first=first,
                every=int(rng.integers(2, 40)) if state != "compacting" else 3,
                child=state == "compacting",
            )
            check(path, steps, kept=first)
            num_acknowledged += len(steps)
            shutil.rmtree(path, ignore_errors=True)
    assert num_acknowledged > 10 * num_kills


def test_killed_at_twenty_moments(tmp_path):
    kill_many(tmp_path, 20, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_three_hundred_moments(tmp_path):
    kill_many(tmp_path, 300, seed=1)


@pytest.mark.slow
def test_killed_and_resumed_twenty_times(tmp_path):
    rng = np.random.default_rng(2)
    first, num_started = 0, 0
    with server() as kill_at:
        for _ in range(20):
            steps = kill_at(tmp_path / "run", rng.uniform(0, 0.2), least=1, first=first, every=5)
            num_started += bool(steps)
            check(tmp_path / "run", steps, kept=first)
            there = open_run(tmp_path / "run")["train"]["step"].values
            first = int(rng.integers(1, len(there) + 1))
    run = open_run(tmp_path / "run")
    assert len(run["segments"]["segment"]) >= num_started
    assert len(set(run["segments"]["segment"].values)) == len(run["segments"]["segment"])
    for name, group in run["superseded"].children.items():
        segment = int(name.removeprefix("segment_"))
        for step, own, loss in zip(
            *(group["train"][v].values for v in ("step", "segment", "loss")), strict=True
        ):
            assert own <= segment
            assert loss == expected(step, own)[0][0, 0]
