"""A writer that threads share, that a fork inherits, or whose process goes to another folder."""

import os
import threading

import numpy as np
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"g/0": "gen", "a/0": "agg"}
POLICIES = {"gen": "p", "agg": "p"}


def in_child(work):
    """Runs a function in a fork; returns what it said, after the fork has ended by itself."""
    reader, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(sender, said.encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def calls(writer):
    return {
        "append": lambda: writer.append(1),
        "append_evaluation": lambda: writer.append_evaluation(1, num_correct=1, num_total=2, dataset="d"),
        "append_event": lambda: writer.append_event(1, "note", "x"),
        "append_rows": lambda: writer.append_rows(1, row_id=["a"]),
        "append_modules": lambda: writer.append_modules(1, slots=["g/0"], modules=["m"], grad_norm=[[1.0]]),
        "compact": lambda: writer.compact(wait=True),
    }


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", list(calls(None)))
def test_a_fork_is_refused_in_one_line_and_changes_nothing(tmp_path, name):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        said = in_child(calls(writer)[name])
        assert said == (
            f"RunFileError: {tmp_path}/run.h5: this writer belongs to process {os.getpid()}; "
            "open one of its own."
        )
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        writer.append(1)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("end", ["close", "leave", "fail"])
def test_a_fork_that_closes_leaves_the_run_to_its_parent(tmp_path, end):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)

    def leave():
        if end == "close":
            writer.close()
            return
        with writer:
            if end == "fail":
                raise ValueError("x")

    writer.append(0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert in_child(leave) == ("ValueError: x" if end == "fail" else "None")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    writer.append(1)
    writer.close()
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_never_waits_for_a_thread_that_it_does_not_have(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
        held, ended = threading.Event(), threading.Event()

        def hold():
            with writer._termination:
                held.set()
                ended.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            assert in_child(writer.close) == "None"
            assert in_child(lambda: writer.append(1)).startswith("RunFileError")
        finally:
            ended.set()
            thread.join()


def test_threads_share_a_writer(tmp_path):
    failures = []
    num = 300

    def repeat(call):
        try:
            for step in range(num):
                call(step)
        except BaseException as error:
            failures.append(error)

    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        record = UpdateRecord("p", ("g/0", "a/0"), np.eye(2))
        work = [
            lambda step: writer.append(step, record, metrics={"loss": 1.0}),
            lambda step: writer.append_evaluation(step, num_correct=1, num_total=2, dataset="d"),
            lambda step: writer.append_event(step, "note", "one"),
            lambda step: writer.append_event(step, "note", "two"),
        ]
        threads = [threading.Thread(target=repeat, args=(call,)) for call in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    run = open_run(tmp_path)
    assert run["train"]["step"].values.tolist() == list(range(num))
    assert run["eval"].sizes["evaluation"] == num
    assert run["events"].sizes["event"] == 2 * num


def test_a_method_waits_for_the_one_in_another_thread(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        order = []

        def append():
            writer.append(0)
            order.append("appended")

        with writer._termination:
            thread = threading.Thread(target=append)
            thread.start()
            thread.join(0.2)
            order.append("left")
        thread.join()
    assert order == ["left", "appended"]


def test_a_closed_writer_says_so_in_its_own_process(tmp_path):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    writer.close()
    with pytest.raises(RunFileError, match="this writer is closed"):
        writer.append(0)


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunWriter("run", slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
        os.chdir(tmp_path / "elsewhere")
        for step in range(1, 101):
            writer.append(step)
        assert open_run(tmp_path / "run")["train"].sizes["step"] == 101
    assert open_run(tmp_path / "run")["train"].sizes["step"] == 101
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 101
    assert list((tmp_path / "elsewhere").iterdir()) == []
