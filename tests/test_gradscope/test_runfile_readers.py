"""A reader in a loop while a writer appends and compacts: every open succeeds, steps never go back."""

import subprocess
import sys

import numpy as np

from gradscope.runfile import open_run

# Waits for a reader every 40 steps, so that there are readers all along; the next open runs beside it.
WRITER = """
import sys
from gradscope.runfile import RunWriter, log
log.WORTH_A_CHILD = 200_000
slots = {f"a/{n}": "a" for n in range(7)}
with RunWriter(sys.argv[1], slots=slots, policies={"a": "p"}) as writer:
    for step in range(2000):
        writer.append(step, metrics={"loss": step / 7, "reward_mean": dict.fromkeys(slots, step / 3)})
        if step % 40 == 0:
            print(step, flush=True)
            sys.stdin.readline()
        if step % 23 == 0:
            writer.compact()
print("ended", flush=True)
"""


def test_a_reader_in_a_loop_during_two_thousand_steps(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    seen = [0]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while (line := process.stdout.readline()) != "ended\n":
            process.stdin.write("go on\n")
            process.stdin.flush()
            run = open_run(tmp_path)
            steps = run["train"]["step"].values
            assert "damage" not in run.attrs
            np.testing.assert_array_equal(steps, np.arange(len(steps)))
            np.testing.assert_array_equal(run["train"]["loss"], steps / 7)
            np.testing.assert_array_equal(run["train"]["reward_mean"], (steps / 3)[:, None] * np.ones(7))
            assert len(steps) >= max(seen[-1], int(line) + 1)
            seen.append(len(steps))
    assert len(seen) == 51
    assert len(open_run(tmp_path)["train"]["step"]) == 2000
