"""A reader in a loop while a writer appends and compacts: every open succeeds, steps never go back."""

import subprocess
import sys
import warnings

import h5py
import numpy as np

from gradscope.runfile import RunWriter, open_run

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


def test_no_name_is_searched_for_however_many_variables_there_are(tmp_path, monkeypatch):
    """HDF5 finds the name of a scale by a search through the file, which made opening quadratic."""
    whole, asked = h5py.Dataset.name, []
    monkeypatch.setattr(h5py.Dataset, "name", property(lambda own: asked.append(own) or whole.fget(own)))
    found = []
    for num in (3, 30):
        path = tmp_path / str(num)
        with (
            warnings.catch_warnings(),
            RunWriter(path, slots={"g/0": "g"}, policies={"g": "p"}) as writer,
        ):
            warnings.simplefilter("ignore")
            own = {f"plain_{at}": 1.0 for at in range(num)}
            writer.append(0, metrics={**own, **{f"by_{name}": {"g/0": 2.0} for name in own}})
        asked.clear()
        run = open_run(path)
        found.append(len(asked))
        assert len(run["user"].data_vars) == 2 * num
        assert run["user"]["by_plain_0"].dims == ("step", "slot")
    assert found[0] == found[1]
