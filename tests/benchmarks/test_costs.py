"""CPU time of instrumentation, logging and diagnosis: printed, never asserted on (`make bench`)."""

import statistics
import subprocess
import sys
import time

import pytest

from gradscope import RunWriter, synthetic

pytestmark = pytest.mark.benchmark


def cpu(call) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


@pytest.mark.parametrize(
    "cell", ["single-shared-stack_code", "voting-shared-stack_code", "eval_opt-isolated-stack_code"]
)
def test_a_training_step_with_and_without_probes(cell, capsys):
    from gradscope.train import load_config
    from gradscope.train.session import Session

    sessions = {on: Session(load_config(cell, [f"probes.enabled={on}"])) for on in ("true", "false")}
    seconds = {on: [] for on in sessions}
    for step in range(1, 16):
        for on, session in sessions.items():  # interleaved, so that a busy machine slows both alike
            seconds[on].append(cpu(lambda session=session, step=step: session.train_step(step)))
    medians = {on: statistics.median(values[3:]) for on, values in seconds.items()}
    with capsys.disabled():
        ratio = medians["true"] / medians["false"]
        print(f"\n{cell}: {medians['true']:.3f} CPU s a step with probes, {ratio:.2f} times without")
    for session in sessions.values():
        session.close()


def test_appending_a_step(tmp_path, capsys):
    slots = {f"worker/{k}": "worker" for k in range(7)}
    metrics = {"loss": 0.1, "reward_mean": dict.fromkeys(slots, 0.5), "entropy": dict.fromkeys(slots, 0.1)}
    with RunWriter(tmp_path / "run", slots=slots, policies={"worker": "shared"}) as writer:
        seconds = [cpu(lambda step=step: writer.append(step, metrics=metrics)) for step in range(1000)]
    with capsys.disabled():
        print(f"\nappend: {1e3 * statistics.median(seconds):.2f} ms CPU a step (median of 1000, all threads)")


def test_diagnosing_a_run(tmp_path, capsys):
    synthetic.write_run(tmp_path / "run", "cliff", seed=0)
    script = (
        "import sys, time\nfrom gradscope import cli\n"
        "try:\n    cli.main(['diagnose', sys.argv[1]])\nexcept SystemExit:\n    print(time.process_time())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with capsys.disabled():
        print(f"\ndiagnose: {float(out.splitlines()[-1]):.2f} CPU s, imports included")
