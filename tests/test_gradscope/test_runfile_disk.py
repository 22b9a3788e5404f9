"""A disk that fills up, fails or goes away: training goes on, and nothing is lost once it is back."""

import errno
import os
import resource
import shutil
import subprocess
import warnings
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from gradscope.runfile import RunWriter, durable, open_run

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}


def told(call):
    """Calls and returns the warnings' texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def append_all(writer, steps):
    for step in steps:
        writer.append(step, metrics={"loss": step / 7, "reward_mean": dict.fromkeys(SLOTS, float(step))})


def check(path, num_steps):
    run = open_run(path)
    assert run["train"]["step"].values.tolist() == list(range(num_steps))
    np.testing.assert_array_equal(run["train"]["loss"], np.arange(num_steps) / 7)
    np.testing.assert_array_equal(run["train"]["reward_mean"], np.arange(num_steps)[:, None] * np.ones(2))
    return run


@contextmanager
def failing(monkeypatch, name, number):
    """Makes one system call of the durable layer fail with an error, always."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(durable, name, fail)
        yield


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOSPC, errno.EDQUOT])
def test_records_wait_while_no_write_succeeds(tmp_path, monkeypatch, number):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    append_all(writer, range(5))
    with failing(monkeypatch, "append", number):
        (message,) = told(lambda: append_all(writer, range(5, 120)))  # one warning, also of the compaction
        assert open_run(tmp_path)["train"]["step"].values.tolist() == list(range(5))
    assert f"the journal cannot be written ({os.strerror(number)})" in message
    append_all(writer, range(120, 122))
    check(tmp_path, 122)
    writer.close()
    kinds = check(tmp_path, 122)["events"]["kind"].values.tolist()
    assert kinds[0] == ("disk_full" if number in (errno.ENOSPC, errno.EDQUOT) else "write_failed")


@pytest.mark.parametrize("policy", ["checkpoint", "record"])
def test_a_failing_fsync_is_told_once_and_costs_nothing(tmp_path, monkeypatch, policy):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, fsync=policy)
    append_all(writer, range(3))
    with failing(monkeypatch, "sync_data", errno.EIO):
        texts = told(lambda: (append_all(writer, range(3, 6)), writer.compact(wait=True), writer.compact()))
    assert sum("fsync failed" in text for text in texts) == 1
    append_all(writer, range(6, 8))
    writer.close()
    assert "write_failed" in check(tmp_path, 8)["events"]["kind"].values


def test_a_journal_that_fails_for_good_is_left_for_a_new_one(tmp_path, monkeypatch):
    """As on a network file system whose server lost the file: the descriptor never works again."""
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    append_all(writer, range(3))
    broken = writer._recorder._log._journal._descriptor
    whole = durable.append

    def append(descriptor, data):
        if descriptor == broken and data[8] == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(descriptor, data)

    monkeypatch.setattr(durable, "append", append)
    assert told(lambda: append_all(writer, range(3, 6))) == []
    assert sorted(path.name for path in tmp_path.glob("*.wal.*")) == [
        "run.h5.wal.000000",
        "run.h5.wal.000001",
    ]
    check(tmp_path, 6)
    writer.close()
    check(tmp_path, 6)


def test_a_folder_that_goes_away_and_comes_back(tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    writer = RunWriter(run, slots=SLOTS, policies=POLICIES)
    append_all(writer, range(5))
    run.rename(away)
    texts = told(lambda: append_all(writer, range(5, 80)))
    assert sum("the journal cannot be written (No such file or directory)" in text for text in texts) == 1
    assert open_run(away)["train"]["step"].values.tolist() == list(range(5))
    away.rename(run)
    append_all(writer, range(80, 82))
    check(run, 82)
    writer.close()
    check(run, 82)
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "run.h5"]


def test_a_folder_that_was_deleted_and_made_anew_gets_what_the_journal_had(tmp_path):
    run = tmp_path / "run"
    writer = RunWriter(run, slots=SLOTS, policies=POLICIES)
    append_all(writer, range(5))
    run.rename(tmp_path / "deleted")
    shutil.rmtree(tmp_path / "deleted")
    told(lambda: append_all(writer, range(5, 10)))
    run.mkdir()
    append_all(writer, range(10, 12))
    check(run, 12)
    writer.close()
    check(run, 12)


def test_a_run_that_another_writer_took_over_is_left_alone(tmp_path):
    """As after a pause so long that this one counted as dead."""
    first = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    append_all(first, range(5))
    (announcement,) = tmp_path.glob("run.h5.lock.*")
    announcement.unlink()
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=4) as second:
        texts = told(lambda: append_all(first, range(5, 80)))
        append_all(second, range(5, 7))
        texts += told(first.close)
    assert sum("is writing this run" in text for text in texts) == 3  # journal, compaction, what is lost
    check(tmp_path, 7)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MB, full when something of that size stands there."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def test_a_full_disk_loses_nothing_once_there_is_room(small_disk):
    writer = RunWriter(small_disk / "run", slots=SLOTS, policies=POLICIES)
    append_all(writer, range(40))
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))
    texts = told(lambda: append_all(writer, range(40, 150)))
    assert sum("the journal cannot be written (No space left on device)" in text for text in texts) == 1
    before = open_run(small_disk / "run")["train"]["step"].values.tolist()
    assert before == list(range(len(before)))
    assert 40 <= len(before) < 150
    ballast.unlink()
    append_all(writer, [150])
    check(small_disk / "run", 151)
    writer.close()
    assert "disk_full" in check(small_disk / "run", 151)["events"]["kind"].values


def test_a_disk_that_fills_up_and_empties_many_times(small_disk):
    """The whole run needs more than the disk has while there is ballast, and compactions fail in between."""
    writer = RunWriter(small_disk / "run", slots=SLOTS, policies=POLICIES)
    ballast = small_disk / "ballast"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for round_ in range(6):
            free = os.statvfs(small_disk)
            with suppress(OSError):  # a compaction in the background may take the room meanwhile
                ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - 4096 * (1 + round_))))
            append_all(writer, range(100 * round_, 100 * round_ + 90))
            ballast.unlink()
            append_all(writer, range(100 * round_ + 90, 100 * round_ + 100))
        writer.close()
    check(small_disk / "run", 600)


@pytest.fixture
def file_size_limit():
    """Sets a limit on the size of files: writes return short, then fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("extra", [0, 1, 30, 150])
def test_a_write_cut_short_anywhere_is_taken_back(tmp_path, file_size_limit, extra):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    append_all(writer, range(5))
    journal = tmp_path / "run.h5.wal.000000"
    size = journal.stat().st_size
    file_size_limit(size + extra)
    told(lambda: append_all(writer, range(5, 40)))
    assert journal.stat().st_size == size
    file_size_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    append_all(writer, [40])
    check(tmp_path, 41)
    writer.close()
    check(tmp_path, 41)
