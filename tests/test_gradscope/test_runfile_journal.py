"""A journal gives back its whole records, whatever happened to the rest; a full disk loses nothing."""

import resource
import shutil
import warnings

import numpy as np
import pytest

from gradscope.errors import RunFileError, SchemaError
from gradscope.runfile import RunWriter, frames, open_run
from gradscope.runfile.load import load

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}


def make_frames(num):
    rng = np.random.default_rng(0)
    payloads = [rng.bytes(int(rng.integers(0, 60))) for _ in range(num)]
    return [frames.Frame(frames.ROWS_KIND, n + 1, 7, payload) for n, payload in enumerate(payloads)]


def test_a_cut_journal_gives_back_exactly_its_whole_frames():
    written = make_frames(12)
    pieces = [frames.encode(frame) for frame in written]
    data = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    for cut in range(len(data) + 1):
        found, damages = frames.scan(data[:cut])
        num_whole = int(np.sum(ends <= cut))
        assert found == written[:num_whole]
        rest = cut - (int(ends[num_whole - 1]) if num_whole else 0)
        assert damages == ([frames.Damage(cut - rest, rest, at_end=True, unfinished=True)] if rest else [])


def test_every_flipped_bit_costs_exactly_its_own_frame():
    written = make_frames(6)
    pieces = [frames.encode(frame) for frame in written]
    data = b"".join(pieces)
    owners = np.repeat(np.arange(6), [len(piece) for piece in pieces])
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        found, damages = frames.scan(bytes(damaged))
        owner = int(owners[bit // 8])
        assert found == written[:owner] + written[owner + 1 :]
        assert sum(damage.num_bytes for damage in damages) == len(pieces[owner])


def killed_run(path, num_steps):
    """Returns the directory of a run whose writer is still there but copied away from, as after a kill."""
    writer = RunWriter(path / "live", slots=SLOTS, policies=POLICIES)
    for step in range(num_steps):
        writer.append(step, metrics={"loss": step / 7})
    shutil.copytree(path / "live", path / "dead")
    writer.close()
    return path / "dead"


def test_a_run_with_a_cut_journal_reads_up_to_the_cut(tmp_path):
    run = killed_run(tmp_path, 20)
    journal = run / "run.h5.wal.000000"
    data = journal.read_bytes()
    found, _ = frames.scan(data)
    assert [frame.kind for frame in found[:2]] == [frames.HEADER_KIND, frames.ROWS_KIND]
    ends = np.cumsum([len(frames.encode(frame)) for frame in found])
    for cut in np.random.default_rng(1).integers(ends[2], len(data), 40):
        journal.write_bytes(data[:cut])
        steps = open_run(run)["train"]["step"].values.tolist()
        assert steps == list(range(int(np.sum(ends <= cut)) - 2))


def test_damage_in_the_middle_costs_one_step_and_is_told(tmp_path):
    run = killed_run(tmp_path, 20)
    journal = run / "run.h5.wal.000000"
    data = bytearray(journal.read_bytes())
    found, _ = frames.scan(bytes(data))
    start = sum(len(frames.encode(frame)) for frame in found[:7])
    data[start + 30] ^= 4
    journal.write_bytes(data)
    loaded = load(run)
    assert loaded.num_missing == 1
    assert loaded.journals[0].damages[0].offset == start
    assert not loaded.journals[0].damages[0].at_end
    with pytest.warns(UserWarning, match="1 record is lost from the journals"):
        assert open_run(run)["train"]["step"].values.tolist() == [n for n in range(20) if n != 5]
    with RunWriter(run, slots=SLOTS, policies=POLICIES, resume_from_step=19):
        pass
    events = open_run(run)["events"]
    assert events["kind"].values.tolist() == ["resume", "dropped_records"]
    assert events["message"].values[1] == "1 record is lost."


def test_a_journal_that_outlives_its_compaction_doubles_nothing(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        for step in range(10):
            writer.append(step, metrics={"loss": step})
            writer.append_event(step, "checkpoint", "saved")
        journal = tmp_path / "run" / "run.h5.wal.000000"
        kept = journal.read_bytes()
        writer.compact(wait=True)
        writer.append(10, metrics={"loss": 10})
        journal.write_bytes(kept)
        run = open_run(tmp_path / "run")
        assert run["train"]["step"].values.tolist() == list(range(11))
        assert len(run["events"]["event"]) == 10


def test_a_journal_without_its_header_is_read_by_the_labels_of_the_run_file(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0, metrics={"loss": 0})
        writer.compact(wait=True)
        writer.append(1, metrics={"loss": 1})
        journal = tmp_path / "run" / "run.h5.wal.000001"
        data = bytearray(journal.read_bytes())
        data[25] ^= 1
        journal.write_bytes(data)
        with pytest.warns(UserWarning, match="in the middle, bytes that are no record"):
            assert open_run(tmp_path / "run")["train"]["loss"].values.tolist() == [0, 1]


def test_a_run_of_nothing_but_damage_is_refused(tmp_path):
    (tmp_path / "run.h5.wal.000000").write_bytes(b"\0" * 100)
    with pytest.raises(RunFileError, match="holds no run"):
        open_run(tmp_path)


@pytest.fixture
def file_size_limit():
    """Sets and takes back a limit on the size of files, which behaves as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path, file_size_limit):
    big = {f"slot/{n}": "slot" for n in range(8)}
    writer = RunWriter(tmp_path, slots=big, policies={"slot": "p"})
    metrics = {"reward_mean": dict.fromkeys(big, 0.5)}
    for step in range(5):
        writer.append(step, metrics=metrics)
    journal = tmp_path / "run.h5.wal.000000"
    size = journal.stat().st_size
    file_size_limit(size + 100)  # the next record is written in part
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5, 30):
            writer.append(step, metrics=metrics)
    told = [str(warning.message) for warning in caught]
    assert sum("the journal cannot be written" in message for message in told) == 1
    assert journal.stat().st_size == size
    assert open_run(tmp_path)["train"]["step"].values.tolist() == list(range(5))
    file_size_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    writer.append(30, metrics=metrics)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == list(range(31))
    writer.close()
    run = open_run(tmp_path)
    assert run["train"]["step"].values.tolist() == list(range(31))
    np.testing.assert_array_equal(run["train"]["reward_mean"], np.full((31, 8), 0.5))
    assert "disk_full" in run["events"]["kind"].values


def test_compaction_on_a_full_disk_leaves_file_and_journals(tmp_path, file_size_limit):
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    writer.append(0, metrics={"loss": 0.0})
    writer.compact(wait=True)
    before = (tmp_path / "run.h5").read_bytes()
    writer.append(1, metrics={"loss": 1.0})
    file_size_limit(len(before) // 2)
    with pytest.warns(UserWarning, match="compaction failed"):
        writer.compact(wait=True)
    assert (tmp_path / "run.h5").read_bytes() == before
    assert not (tmp_path / "run.h5.tmp").exists()
    assert open_run(tmp_path)["train"]["loss"].values.tolist() == [0, 1]
    file_size_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    writer.close()
    assert open_run(tmp_path)["train"]["loss"].values.tolist() == [0, 1]


def journal_of_a_step(path):
    """Returns the journal of a run of one step, numbered as those below."""
    writer = RunWriter(path, slots=SLOTS, policies=POLICIES)
    writer.append(10, metrics={"loss": 10})
    data = (path / "run.h5.wal.000000").read_bytes()
    writer.close()
    return data


def test_memory_for_waiting_records_is_bounded_and_the_loss_is_told(tmp_path, file_size_limit, monkeypatch):
    record = frames.encode(frames.scan(journal_of_a_step(tmp_path / "sized"))[0][-1])
    monkeypatch.setattr("gradscope.runfile.log._MOST_WAITING", 10 * len(record) + len(record) // 2)
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES)
    writer.append(0, metrics={"loss": 0.0})
    file_size_limit((tmp_path / "run.h5.wal.000000").stat().st_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 30):
            writer.append(step, metrics={"loss": step})
        file_size_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        writer.append(30, metrics={"loss": 30})
        writer.close()
    run = open_run(tmp_path)
    steps = run["train"]["step"].values.tolist()
    assert steps[0] == 0
    assert steps[-10:] == list(range(21, 31))
    dropped = run["events"].to_dataset().isel(event=run["events"]["kind"].values == "dropped_records")
    assert len(dropped["event"]) == 1
    assert dropped["message"].item().endswith("records are lost, dropped while the disk took none.")


@pytest.mark.parametrize("fsync", ["never", "checkpoint", "record"])
def test_every_fsync_policy_writes_the_same(tmp_path, fsync):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, fsync=fsync) as writer:
        writer.append(0, metrics={"loss": 1.0})
        writer.compact(wait=True)
        writer.append(1, metrics={"loss": 2.0})
    assert open_run(tmp_path)["train"]["loss"].values.tolist() == [1, 2]


def test_an_unknown_fsync_policy_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(SchemaError, match=r"'always' is no policy\. Allowed: never, checkpoint, record"):
        RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES, fsync="always")
    assert not (tmp_path / "run").exists()
