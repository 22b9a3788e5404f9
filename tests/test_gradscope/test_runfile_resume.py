"""A resumed run: later rows move aside, the main axis stays strictly increasing, nothing is lost."""

import json
import os

import numpy as np
import pytest
import xarray as xr

from gradscope.errors import RunFileError, SchemaError
from gradscope.runfile import RunWriter, UpdateRecord, durable, open_run

SLOTS = {"a/0": "a", "b/0": "b"}
POLICIES = {"a": "p", "b": "p"}
NAMES = tuple(SLOTS)


def write_steps(path, steps, *, offset=0.0, resume_from_step=None):
    with RunWriter(path, slots=SLOTS, policies=POLICIES, resume_from_step=resume_from_step) as writer:
        for step in steps:
            records = [UpdateRecord("p", NAMES, (step + offset) * np.eye(2)) for _ in range(2)]
            writer.append(step, records, metrics={"loss": step + offset})
            writer.append_evaluation(step, num_correct=step, num_total=200, dataset="d")
            writer.append_event(step, "checkpoint", "saved")
            writer.append_rows(step, row_id=[f"{step}"])


def test_later_rows_move_to_the_segment_that_they_belonged_to(tmp_path):
    write_steps(tmp_path, range(100))
    identity = open_run(tmp_path).attrs["run_id"]
    write_steps(tmp_path, range(80, 120), offset=0.5, resume_from_step=79)
    run = open_run(tmp_path)
    train, moved = run["train"].to_dataset(), run["superseded/segment_000"]
    assert train["step"].values.tolist() == list(range(120))
    np.testing.assert_array_equal(train["segment"], [0] * 80 + [1] * 40)
    np.testing.assert_array_equal(train["loss"], [*range(80), *(step + 0.5 for step in range(80, 120))])
    assert moved.attrs == {"superseded_by": 1, "resumed_from_step": 79}
    assert moved["train"]["loss"].values.tolist() == list(range(80, 100))
    assert moved["updates"]["step"].values.tolist() == np.repeat(range(80, 100), 2).tolist()
    assert moved["eval"]["num_correct"].values.tolist() == list(range(80, 100))
    assert moved["rows"]["row_id"].values.tolist() == [str(step) for step in range(80, 100)]
    assert run["updates"]["update"].values.tolist() == list(range(240))
    assert run["rows"]["row"].values.tolist() == list(range(120))
    segments = run["segments"].to_dataset()
    np.testing.assert_array_equal(segments["start_step"], [0, 80])
    np.testing.assert_array_equal(segments["end_step"], [99, 119])
    np.testing.assert_array_equal(segments["resumed_from_step"], [np.nan, 79])
    assert run.attrs["run_id"] == identity
    events = run["events"].to_dataset()
    resume = events.isel(event=events["kind"].values == "resume")
    assert resume["message"].item() == "Segment 1 goes on from step 79; 20 later steps moved aside."
    mirror = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in mirror] == list(
        zip(train["step"].values.tolist(), train["loss"].values.tolist(), strict=True)
    )


def test_plain_xarray_reads_a_resumed_file(tmp_path):
    write_steps(tmp_path, range(10))
    write_steps(tmp_path, range(5, 12), resume_from_step=4)
    with xr.open_datatree(tmp_path / "run.h5", engine="h5netcdf") as plain:
        assert plain["superseded/segment_000/train"]["step"].values.tolist() == list(range(5, 10))


def test_resuming_again_and_further_back_loses_nothing(tmp_path):
    write_steps(tmp_path, range(10))
    write_steps(tmp_path, range(8, 12), offset=0.25, resume_from_step=7)
    write_steps(tmp_path, range(4, 6), offset=0.5, resume_from_step=3)
    run = open_run(tmp_path)
    assert run["train"]["loss"].values.tolist() == [0, 1, 2, 3, 4.5, 5.5]
    assert run["superseded/segment_000/train"]["loss"].values.tolist() == [8, 9]
    second = run["superseded/segment_001/train"].to_dataset()
    assert second["loss"].values.tolist() == [4, 5, 6, 7, 8.25, 9.25, 10.25, 11.25]
    assert second["segment"].values.tolist() == [0] * 4 + [1] * 4
    np.testing.assert_array_equal(run["segments"]["end_step"], [9, 11, 5])


def test_a_crashed_run_resumes_from_its_journal_alone(tmp_path):
    writer = RunWriter(tmp_path / "live", slots=SLOTS, policies=POLICIES)
    for step in range(6):
        writer.append(step, metrics={"loss": step})
    (tmp_path / "dead").mkdir()
    journal = (tmp_path / "live" / "run.h5.wal.000000").read_bytes()
    (tmp_path / "dead" / "run.h5.wal.000000").write_bytes(journal[:-7])
    writer.close()
    for name in ("run.h5.tmp", "run.h5.wal.000001.tmp"):
        (tmp_path / "dead" / name).write_bytes(b"half of a file")
    write_steps(tmp_path / "dead", range(4, 7), resume_from_step=3)
    run = open_run(tmp_path / "dead")
    assert run["train"]["step"].values.tolist() == list(range(7))
    assert run["superseded/segment_000/train"]["step"].values.tolist() == [4]
    assert sorted(path.name for path in (tmp_path / "dead").iterdir()) == ["metrics.jsonl", "run.h5"]


def test_resuming_at_the_end_moves_nothing(tmp_path):
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, range(3, 5), resume_from_step=2)
    run = open_run(tmp_path)
    assert "superseded" not in run.children
    assert run["train"]["step"].values.tolist() == list(range(5))


def test_resuming_from_before_the_first_step_moves_all(tmp_path):
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, range(2), offset=0.5, resume_from_step=-1)
    run = open_run(tmp_path)
    assert run["train"]["loss"].values.tolist() == [0.5, 1.5]
    assert run["superseded/segment_000/train"]["loss"].values.tolist() == [0, 1, 2]


def test_user_variables_move_with_their_rows(tmp_path):
    for first, resume in ((0, None), (3, 2)):
        with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=resume) as writer:
            record = UpdateRecord("p", NAMES, np.eye(2), scalars={"trust": 1.0})
            for step in range(first, first + 5):
                if step == 0:
                    with pytest.warns(UserWarning, match="/user/"):
                        writer.append(step, record, metrics={"mine": 0})
                else:
                    writer.append(step, record, metrics={"mine": step})
    run = open_run(tmp_path)
    assert run["user"]["mine"].values.tolist() == list(range(8))
    assert run["user"]["trust"].values.tolist() == [1] * 8
    assert run["superseded/segment_000/user"]["mine"].values.tolist() == [3, 4]


def test_new_slots_come_with_a_resume(tmp_path):
    write_steps(tmp_path, range(3))
    slots = {"c/0": "c", **SLOTS}
    with RunWriter(tmp_path, slots=slots, policies={**POLICIES, "c": "q"}, resume_from_step=2) as writer:
        writer.append(3, UpdateRecord("q", ("c/0",), np.array([[4.0]])))
    run = open_run(tmp_path)
    assert run["slot"].values.tolist() == ["a/0", "b/0", "c/0"]
    gram = run["updates"]["gram"].sel(slot="c/0", slot_b="c/0").values
    np.testing.assert_array_equal(gram, [np.nan] * 6 + [4])


def test_a_step_up_to_the_checkpoint_is_refused(tmp_path):
    write_steps(tmp_path, range(3))
    with (
        RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=2) as writer,
        pytest.raises(SchemaError, match=r"step 2 follows step 2; steps must increase"),
    ):
        writer.append(2)


def test_a_slot_keeps_its_role_and_policy(tmp_path):
    write_steps(tmp_path, range(3))
    before = (tmp_path / "run.h5").read_bytes()
    with pytest.raises(SchemaError, match="slot 'b/0' has policy 'p', now 'q'"):
        RunWriter(tmp_path, slots=SLOTS, policies={"a": "p", "b": "q"}, resume_from_step=2)
    with pytest.raises(SchemaError, match="slot 'b/0' has role 'b', now 'a'"):
        RunWriter(tmp_path, slots={"a/0": "a", "b/0": "a"}, policies={"a": "p"}, resume_from_step=2)
    assert (tmp_path / "run.h5").read_bytes() == before


def test_resuming_where_no_run_is(tmp_path):
    with pytest.raises(RunFileError, match="holds no run"):
        RunWriter(tmp_path / "new", slots=SLOTS, policies=POLICIES, resume_from_step=2)


def test_the_lines_that_a_resume_keeps_are_on_the_disk_before_they_take_their_name(tmp_path, monkeypatch):
    write_steps(tmp_path, range(4))
    calls = []
    for name in ("sync_data", "rename", "sync"):
        whole = getattr(durable, name)

        def noted(what, *target, name=name, whole=whole):
            place = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            calls.append((name, place))
            return whole(what, *target)

        monkeypatch.setattr(durable, name, noted)
    write_steps(tmp_path, [3], resume_from_step=2)
    new = str(tmp_path / "metrics.jsonl.tmp")
    at = calls.index(("rename", new))
    assert ("sync_data", new) in calls[:at]
    assert calls[at + 1] == ("sync", str(tmp_path))
