"""Two writers on one run: the second is refused, on this machine and from another; the dead block nobody."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, durable, lock, open_run
from gradscope.runfile.process import is_alive, myself
from gradscope.runfile.summary import summarize

SLOTS = {"a/0": "a"}
POLICIES = {"a": "p"}


def write(path, *, resume=None, step=0):
    with RunWriter(path, slots=SLOTS, policies=POLICIES, resume_from_step=resume) as writer:
        writer.append(step)


def announce(path, process, name="run.h5.lock.other"):
    """Leaves the announcement of a process beside a run."""
    file = path / name
    file.write_text("")
    place = {"inode": file.stat().st_ino, "path": str(file)}
    file.write_text(json.dumps({**asdict(process), **place}))
    return file


FAR = replace(myself(), host="far-away", place="another boot", pid=1)


def test_an_announcement_of_a_live_process_here_refuses(tmp_path):
    write(tmp_path)
    own = announce(tmp_path, replace(myself(), pid=os.getppid(), started=started_of(os.getppid())))
    with pytest.raises(
        RunFileError, match=rf"process {os.getppid()} on .* is writing this run\. End it first"
    ):
        write(tmp_path, resume=0, step=1)
    assert sorted(path.name for path in tmp_path.glob("run.h5.*")) == [own.name]


def started_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def test_a_number_that_another_process_got_since_does_not_refuse(tmp_path):
    write(tmp_path)
    announce(tmp_path, replace(myself(), started=myself().started - 1))
    write(tmp_path, resume=0, step=1)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]
    assert not list(tmp_path.glob("run.h5.*"))


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    own = replace(myself(), pid=process.pid, started=started_of(process.pid))
    assert is_alive(own) is True
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(own) is False
    process.wait()
    assert is_alive(own) is False


def test_a_process_of_another_machine_or_container_cannot_be_looked_up():
    assert is_alive(FAR) is None
    assert is_alive(replace(myself(), place="other")) is None


def test_a_writer_elsewhere_that_shows_no_sign_of_life_is_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.5)
    write(tmp_path)
    announce(tmp_path, FAR)
    assert summarize(tmp_path)["state"] == "being written by process 1 on far-away"
    with pytest.warns(UserWarning, match=r"process 1 on far-away announced to write this run; waiting up to"):
        write(tmp_path, resume=0, step=1)
    assert not list(tmp_path.glob("run.h5.*"))


@pytest.mark.parametrize("has_signed", [True, False])
def test_a_writer_elsewhere_that_touches_its_announcement_is_alive(tmp_path, has_signed):
    write(tmp_path)
    other = announce(tmp_path, FAR)
    if not has_signed:
        other.write_text("")  # as a loss of power may leave it
    ended = threading.Event()

    def touch():
        number = 0
        while not ended.wait(0.02):
            number += 1
            os.utime(other, ns=(number, number))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with (
            pytest.warns(UserWarning, match="waiting up to"),
            pytest.raises(RunFileError, match=f"If it is gone for good, delete {other.name}"),
        ):
            write(tmp_path, resume=0, step=1)
    finally:
        ended.set()
        thread.join()


def test_a_writer_touches_its_announcement(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES):
        (own,) = tmp_path.glob("run.h5.lock.*")
        os.utime(own, (1, 1))
        while own.stat().st_mtime == 1:  # ends with the test's own time limit if it is never touched
            pass
        assert json.loads(own.read_text())["pid"] == os.getpid()


def test_an_announcement_that_came_with_a_copy_of_a_live_run_blocks_nobody(tmp_path):
    writer = RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES)
    writer.append(0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert summarize(tmp_path / "copy")["state"] == "not closed: the writer ended without close()"
    write(tmp_path / "copy", resume=0, step=1)
    writer.close()
    assert open_run(tmp_path / "copy")["train"]["step"].values.tolist() == [0, 1]


RACE = """
import sys
from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter
import gradscope.runfile.compaction
sys.stdin.readline()
try:
    writer = RunWriter(sys.argv[1], slots={"a/0": "a"}, policies={"a": "p"}, resume_from_step=0)
except RunFileError:
    print("refused", flush=True)
else:
    print("writing", flush=True)
    sys.stdin.readline()
    writer.close()
"""


def test_of_writers_that_begin_at_once_never_two_go_on(tmp_path):
    write(tmp_path)
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    said = [writer.stdout.readline() for writer in writers]
    for writer in writers:
        writer.communicate("end\n", timeout=60)
    assert said.count("writing\n") <= 1
    assert set(said) <= {"writing\n", "refused\n"}
    write(tmp_path, resume=0, step=1)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]


def test_a_lock_that_cannot_be_deleted_is_told_of_and_blocks_not_its_own_process(tmp_path, monkeypatch):
    remove = durable.remove

    def refuse(path):
        if ".lock." in path.name:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path)

    monkeypatch.setattr(durable, "remove", refuse)
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    writer.append(0)
    with pytest.warns(
        UserWarning, match=r"run\.h5\.lock\.\w+: cannot be deleted .*; others .* process"
    ) as told:
        writer.close()
    assert [str(warning.message).count("\n") for warning in told] == [0]
    assert summarize(tmp_path)["state"].startswith("closed at")
    assert len(list(tmp_path.glob("run.h5.lock.*"))) == 1
    monkeypatch.setattr(durable, "remove", remove)
    write(tmp_path, resume=0, step=1)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]
    other = "import sys; from gradscope.runfile.lock import writer_of; from pathlib import Path; "
    other += "print(writer_of(Path(sys.argv[1])))"
    said = subprocess.run(
        [sys.executable, "-c", other, str(tmp_path / "run.h5.lock")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert said.stdout.startswith(f"process {os.getpid()} on")
