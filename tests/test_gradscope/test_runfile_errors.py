"""What is refused, in one line that says what was found, where, and what to do."""

import json
import os
import re
import signal
import subprocess
import sys

import h5py
import pytest

from gradscope.errors import GradscopeError, RunFileError, SchemaError, UnknownNameError
from gradscope.runfile import RunWriter, open_run

SLOTS = {"a/0": "a", "b/0": "b"}
POLICIES = {"a": "p", "b": "p"}


def refusal(error, call):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, GradscopeError)
    assert "\n" not in message
    return message


def test_missing_path(tmp_path):
    message = refusal(RunFileError, lambda: open_run(tmp_path / "nowhere"))
    assert message.startswith(f"{tmp_path}/nowhere: no such file or directory.")


def test_empty_directory(tmp_path):
    message = refusal(RunFileError, lambda: open_run(tmp_path))
    assert message == (
        f"{tmp_path}: holds no run. Expected run.h5 or journals run.h5.wal.* there; "
        "a run has them from its first second on."
    )


def test_folder_of_runs(tmp_path):
    with RunWriter(tmp_path / "one", slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
    assert refusal(RunFileError, lambda: open_run(tmp_path)).endswith(f"did you mean {tmp_path}/one?")


def test_foreign_file(tmp_path):
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["x"] = 1
    assert "without the attribute schema_version, so not a run file" in refusal(
        RunFileError, lambda: open_run(tmp_path / "run.h5")
    )


def test_no_hdf5_at_all(tmp_path):
    (tmp_path / "run.h5").write_text("hello")
    assert "not a readable run file" in refusal(RunFileError, lambda: open_run(tmp_path))


def test_file_cut_short(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
    data = (tmp_path / "run.h5").read_bytes()
    for part in (0.0, 0.3, 0.7, 0.99):
        (tmp_path / "run.h5").write_bytes(data[: int(part * len(data))])
        assert "Was the copy cut short?" in refusal(RunFileError, lambda: open_run(tmp_path))


def set_version(path, version):
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = version


def test_newer_major_version_is_refused_and_newer_minor_read(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
    set_version(tmp_path / "run.h5", "2.0")
    assert "written in schema 2.0, this version reads 1.x. Install a newer gradscope." in refusal(
        RunFileError, lambda: open_run(tmp_path)
    )
    set_version(tmp_path / "run.h5", "1.7")
    with pytest.warns(UserWarning, match=r"schema 1\.7 is newer than 1\.0"):
        run = open_run(tmp_path)
    assert run["train"]["step"].values.tolist() == [0]


def test_unknown_variables_and_groups_are_ignored(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["train/later"] = [1.0]
        file["invention/x"] = 2
    run = open_run(tmp_path)
    assert "later" not in run["train"]
    assert "invention" not in run.children


def test_an_existing_run_is_refused_without_resume(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
    before = (tmp_path / "run.h5").read_bytes()
    message = refusal(RunFileError, lambda: RunWriter(tmp_path, slots=SLOTS, policies=POLICIES))
    assert message == (
        f"{tmp_path}: holds a run already (run.h5). Resume it (resume_from_step=, --resume) "
        "or write to another path."
    )
    assert (tmp_path / "run.h5").read_bytes() == before
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_steps_must_increase(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(5)
        for step in (5, 4):
            assert f"step {step} follows step 5; steps must increase" in refusal(
                SchemaError, lambda step=step: writer.append(step)
            )
        writer.append(6)
    assert issubclass(SchemaError, ValueError)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [5, 6]


def test_a_closed_writer_is_refused(tmp_path):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    writer.close()
    writer.close()
    assert "this writer is closed" in refusal(RunFileError, lambda: writer.append(0))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (0, "0: a name must be a text, not int"),
        (None, "None: a name must be a text, not NoneType"),
        ("", "'': a name must not be empty or hold NUL"),
        ("a\0b", r"'a\x00b': a name must not be empty or hold NUL"),
        ("\ud83d", r"'\ud83d': a name must not be empty or hold NUL or half of a surrogate pair"),
    ],
)
def test_names_must_be_texts_that_a_file_can_hold(tmp_path, name, what):
    for kind, slots, policies in (
        ("slot", {name: "a"}, {"a": "p"}),
        ("role", {"a/0": name}, {name: "p"}),
        ("policy", {"a/0": "a"}, {"a": name}),
        ("policies:", {"a/0": "a"}, {"a": "p", name: "p"}),
    ):
        message = refusal(
            SchemaError, lambda own=(slots, policies): RunWriter(tmp_path, slots=own[0], policies=own[1])
        )
        assert message.startswith(f"{kind} {what}")
        assert list(tmp_path.iterdir()) == []


def test_policies_must_fit_the_slots(tmp_path):
    assert "policies: unknown role or slot 'aa'. Did you mean 'a'?" in refusal(
        UnknownNameError, lambda: RunWriter(tmp_path, slots=SLOTS, policies={"aa": "p"})
    )
    assert "neither slot 'b/0' nor its role 'b' has a policy" in refusal(
        SchemaError, lambda: RunWriter(tmp_path, slots=SLOTS, policies={"a": "p"})
    )
    assert "slots: empty" in refusal(SchemaError, lambda: RunWriter(tmp_path, slots={}, policies={}))
    assert list(tmp_path.iterdir()) == []


def test_a_slot_may_have_its_own_policy(tmp_path):
    slots = {"a/0": "a", "a/1": "a"}
    with RunWriter(tmp_path, slots=slots, policies={"a": "p", "a/1": "q"}) as writer:
        writer.append(0)
    assert open_run(tmp_path)["slot_policy"].values.tolist() == ["p", "q"]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "a run cannot be written there" in refusal(
        RunFileError, lambda: RunWriter(tmp_path / "file" / "run", slots=SLOTS, policies=POLICIES)
    )


def test_a_second_writer_in_the_same_process_is_refused(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
        for resume in (None, 0):
            message = refusal(
                RunFileError,
                lambda resume=resume: RunWriter(
                    tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=resume
                ),
            )
            assert f"process {os.getpid()} on" in message
        writer.append(1)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]


WRITER = """
import sys, time
from gradscope.runfile import RunWriter
writer = RunWriter(sys.argv[1], slots={"a/0": "a", "b/0": "b"}, policies={"a": "p", "b": "p"})
writer.append(0)
#EXTRA
print("ready", flush=True)
time.sleep(600)
"""


def start_writer(path, extra=""):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER.replace("#EXTRA", extra), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_live_writer_elsewhere_blocks_and_a_killed_one_does_not(tmp_path):
    process = start_writer(tmp_path)
    try:
        message = refusal(
            RunFileError, lambda: RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=0)
        )
        assert f"process {process.pid} on" in message
        assert open_run(tmp_path)["train"]["step"].values.tolist() == [0]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert len(list(tmp_path.glob("run.h5.lock.*"))) == 1
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=0) as writer:
        writer.append(1)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]


def test_a_forked_child_that_outlives_its_killed_writer_does_not_block(tmp_path):
    fork = (
        "import os\nchild = os.fork()\nif child == 0: time.sleep(600)\n"
        "open(sys.argv[1] + '/child', 'w').write(str(child))"
    )
    process = start_writer(tmp_path, fork)
    child = int((tmp_path / "child").read_text())
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)
        with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=0) as writer:
            writer.append(1)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_reader_never_fails_while_a_writer_works(tmp_path):
    seen = []
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        for step in range(40):
            writer.append(step, metrics={"loss": step})
            if step % 3 == 0:
                writer.compact()
            steps = open_run(tmp_path)["train"]["step"].values.tolist()
            assert steps == list(range(step + 1))
            seen.append(len(steps))
    assert seen == list(range(1, 41))


def test_inspect_tells_state_gaps_and_damage(tmp_path):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, seed=3, config={"x": 1})
    for step in (0, 1, 2, 3, 10, 11):
        writer.append(step, metrics={"loss": step})
    writer.append_evaluation(3, num_correct=1, num_total=2, dataset="d")
    summary = inspected(tmp_path)
    assert summary["state"].startswith(f"being written by process {os.getpid()} on ")
    assert summary["steps"] == {"num": 6, "first": 0, "last": 11, "gaps": [[3, 10]]}
    assert summary["evaluations"] == {"d": 1}
    assert summary["num_overlaid_records"] == 8
    writer.close()
    (tmp_path / "run.h5.wal.000007").write_bytes(b"torn")
    summary = inspected(tmp_path)
    assert summary["state"].startswith("closed at 20")
    assert summary["journals"][0]["damage"] == [
        {"offset": 0, "num_bytes": 4, "what": "at the end, bytes that are no record"}
    ]
    assert summary["provenance"]["config"] == {"x": 1}
    assert summary["slots"]["b/0"] == {"role": "b", "policy": "p"}
    assert summary["groups"]["train"]["rows"] == {"step": 6}
    assert 0 < summary["groups"]["train"]["num_bytes"] < summary["files"]["run.h5"]
    text = run_inspect(tmp_path)
    assert re.search(r"  /train: 6 on step, [\d,]+ bytes in the file", text)
    assert "gap: nothing between step 3 and step 10" in text
    assert "    4 bytes from 0: at the end, bytes that are no record" in text


def run_inspect(path, *options):
    program = "import sys; from gradscope.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "inspect", str(path), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inspected(path):
    return json.loads(run_inspect(path, "--json"))
