"""SIGTERM in anyone's loop: the append in progress ends, the log says why, the process dies of it."""

import signal
import subprocess
import sys
from contextlib import contextmanager

from gradscope.runfile import RunWriter, open_run
from gradscope.runfile.summary import summarize

LOOP = """
import os, signal, sys, time
from gradscope.runfile import RunWriter
#BEFORE
writer = RunWriter(sys.argv[1], slots={"a/0": "a"}, policies={"a": "p"}, fsync="record")
#AFTER
for step in range(1_000_000):
    writer.append(step, metrics={"loss": step / 3})
    print(step, flush=True)
"""


@contextmanager
def loop(path, *, before="", after=""):
    program = LOOP.replace("#BEFORE", before).replace("#AFTER", after)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "0\n"
        yield process


def steps_of(path, process):
    """Returns the run's steps, after a check that all that were acknowledged are there."""
    acknowledged = [int(line) for line in process.stdout.read().split()]
    steps = open_run(path)["train"]["step"].values.tolist()
    assert steps == list(range(len(steps)))
    assert set(acknowledged) <= set(steps)
    return steps


def test_a_loop_ends_with_an_event_and_without_a_lock(tmp_path):
    with loop(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        steps = steps_of(tmp_path, process)
        assert process.wait(60) == -signal.SIGTERM
    assert not list(tmp_path.glob("run.h5.lock.*"))
    assert open_run(tmp_path)["events"]["kind"].values.tolist() == ["terminated"]
    assert open_run(tmp_path)["events"]["step"].values.tolist() == [steps[-1]]
    assert summarize(tmp_path)["state"] == "not closed: SIGTERM ended the process"
    with RunWriter(tmp_path, slots={"a/0": "a"}, policies={"a": "p"}, resume_from_step=steps[-1]):
        pass
    assert summarize(tmp_path)["state"].startswith("closed at")


def test_a_handler_of_the_program_is_left_alone(tmp_path):
    before = "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))"
    with loop(tmp_path, before=before) as process:
        process.send_signal(signal.SIGTERM)
        steps_of(tmp_path, process)
        assert process.wait(60) == 3
    assert "events" not in open_run(tmp_path).children


def test_a_fork_that_is_terminated_does_not_end_its_parents_log(tmp_path):
    after = """
reader, ready = os.pipe()
child = os.fork()
if child == 0:
    os.write(ready, b"x")  # before, Python itself forgets signals
    while True: time.sleep(60)
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
assert len([name for name in os.listdir(sys.argv[1]) if "lock" in name]) == 1
"""
    with loop(tmp_path, after=after) as process:
        process.send_signal(signal.SIGKILL)
        steps_of(tmp_path, process)
        process.wait(60)
    assert "events" not in open_run(tmp_path).children


def test_the_signal_in_the_middle_of_an_append_waits_for_its_end(tmp_path):
    """The signal comes from inside the append, as it does when the system delivers it there."""
    after = """
from gradscope.runfile import durable
whole, num = durable.append, []
def append(descriptor, data):
    num.append(1)
    if len(num) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return whole(descriptor, data)
durable.append = append
"""
    with loop(tmp_path, after=after) as process:
        steps = steps_of(tmp_path, process)
        assert process.wait(60) == -signal.SIGTERM
    assert steps == list(range(5))
    assert open_run(tmp_path)["train"]["loss"].values.tolist() == [step / 3 for step in range(5)]
    assert open_run(tmp_path)["events"]["kind"].values.tolist() == ["terminated"]


CLOSING = """
import signal, sys
from gradscope.runfile import RunWriter
one = RunWriter(sys.argv[1] + "/one", slots={"a/0": "a"}, policies={"a": "p"})
other = RunWriter(sys.argv[1] + "/other", slots={"a/0": "a"}, policies={"a": "p"})
one.close()
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
other.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def test_closing_gives_the_signal_back(tmp_path):
    subprocess.run([sys.executable, "-c", CLOSING, str(tmp_path)], check=True, timeout=120)
