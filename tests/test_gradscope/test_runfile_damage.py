"""What of a run is lost or unusable is said: by a warning, an attribute and `gradscope inspect`."""

import re
import shutil
import subprocess
import sys
import warnings

import h5py
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, frames, open_run
from gradscope.runfile.summary import summarize

SLOTS = {"a/0": "a"}
POLICIES = {"a": "p"}


def killed_run(path, *, stored, waiting):
    """A run of a killed writer: `stored` steps in the run file, `waiting` more in its journal."""
    writer = RunWriter(path / "live", slots=SLOTS, policies=POLICIES)
    for step in range(stored):
        writer.append(step)
    if stored:
        writer.compact(wait=True)
    for step in range(stored, stored + waiting):
        writer.append(step)
    shutil.copytree(path / "live", path / "dead")
    writer.close()
    return path / "dead"


def opened(path, damage):
    """Opens a run that must tell of `damage`, once."""
    with pytest.warns(UserWarning, match=re.escape(damage)) as caught:
        run = open_run(path)
    assert [str(warning.message) for warning in caught] == [f"{path}: {damage}"]
    assert run.attrs["damage"] == damage
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert " ".join(summarize(path)["damage"]) == damage
    return run


def test_a_sound_run_has_no_such_attribute(tmp_path):
    run = killed_run(tmp_path, stored=3, waiting=2)
    assert "damage" not in open_run(run).attrs
    assert summarize(run)["damage"] == []


@pytest.mark.parametrize("waiting", [0, 2])
def test_a_run_file_that_has_gone_is_told_with_what_it_held(waiting, tmp_path):
    run = killed_run(tmp_path, stored=10, waiting=waiting)
    (run / "run.h5").unlink()
    # The first record is that of the segment.
    content = opened(
        run, "run.h5 is not there and 11 records are lost with it; put it back beside its journals."
    )
    steps = content["train"]["step"].values.tolist() if waiting else []
    assert steps == list(range(10, 10 + waiting))


def test_a_run_whose_file_has_gone_can_be_resumed(tmp_path):
    run = killed_run(tmp_path, stored=3, waiting=3)
    (run / "run.h5").unlink()
    with RunWriter(run, slots=SLOTS, policies=POLICIES, resume_from_step=4) as writer:
        writer.append(5)
    content = open_run(run)
    assert content["train"]["step"].values.tolist() == [3, 4, 5]
    assert "4 records are lost." in content["events"]["message"].values
    assert content["segments"]["segment"].values.tolist() == [1]
    assert content["train"]["segment"].values.tolist() == [0, 0, 1]
    assert content["superseded/segment_000/train"]["step"].values.tolist() == [5]


def journal_of(run):
    (path,) = run.glob("run.h5.wal.*")
    return path


def test_a_damaged_record_in_the_middle(tmp_path):
    run = killed_run(tmp_path, stored=0, waiting=5)
    data = bytearray(journal_of(run).read_bytes())
    found, _ = frames.scan(bytes(data))
    sizes = [len(frames.encode(frame)) for frame in found]
    start = sum(sizes[:4])
    data[start + 30] ^= 4
    journal_of(run).write_bytes(data)
    opened(
        run,
        f"run.h5.wal.000000: {sizes[4]} bytes from {start}, in the middle, bytes that are no record. "
        "1 record is lost from the journals.",
    )


def test_a_last_record_cut_short_is_no_damage(tmp_path):
    run = killed_run(tmp_path, stored=0, waiting=5)
    journal_of(run).write_bytes(journal_of(run).read_bytes()[:-3])
    assert "damage" not in open_run(run).attrs
    (journal,) = summarize(run)["journals"]
    assert journal["damage"][0]["what"] == "at the end, a write that did not finish"


def test_garbage_at_the_end_is_no_unfinished_write(tmp_path):
    run = killed_run(tmp_path, stored=0, waiting=5)
    size = journal_of(run).stat().st_size
    with journal_of(run).open("ab") as file:
        file.write(b"\0" * 50)
    opened(run, f"run.h5.wal.000000: 50 bytes from {size}, at the end, bytes that are no record.")


def test_a_last_record_that_is_whole_but_wrong_is_no_unfinished_write(tmp_path):
    run = killed_run(tmp_path, stored=0, waiting=5)
    data = bytearray(journal_of(run).read_bytes())
    data[-1] ^= 1
    journal_of(run).write_bytes(data)
    with pytest.warns(UserWarning, match="at the end, bytes that are no record"):
        open_run(run)


def test_a_run_file_of_another_run_is_refused(tmp_path):
    one, other = (killed_run(tmp_path / name, stored=3, waiting=2) for name in ("one", "other"))
    ids = [open_run(run).attrs["run_id"] for run in (one, other)]
    shutil.copy(other / "run.h5", one / "run.h5")
    with pytest.raises(RunFileError) as caught:
        open_run(one)
    assert str(caught.value) == (
        f"{one}: run.h5 is of run {ids[1]}, {journal_of(one).name} of run {ids[0]}; expected files of one "
        "run. Put each run into a folder of its own."
    )


def test_journals_of_two_runs_are_refused(tmp_path):
    one, other = (killed_run(tmp_path / name, stored=0, waiting=2) for name in ("one", "other"))
    data = journal_of(other).read_bytes()
    (one / "run.h5.wal.000001").write_bytes(data)
    with pytest.raises(RunFileError, match=r"wal\.000000 is of run \w+, run\.h5\.wal\.000001 of run"):
        open_run(one)


def test_records_of_another_run_in_a_journal_are_left_out_and_told(tmp_path):
    """As when a file system mixes up blocks: whole records, right checksums, numbers that fit."""
    one, other = (
        killed_run(tmp_path / name, stored=0, waiting=num) for name, num in (("one", 5), ("other", 7))
    )
    foreign, _ = frames.scan(journal_of(other).read_bytes())
    with journal_of(one).open("ab") as file:
        file.write(b"".join(frames.encode(frame) for frame in foreign[5:]))
    run = opened(one, "run.h5.wal.000000: 4 records of another run, left out.")
    assert run["train"]["step"].values.tolist() == list(range(5))


def test_a_live_writer_keeps_off_a_run_file_of_another_run(tmp_path):
    other = killed_run(tmp_path, stored=3, waiting=0)
    writer = RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES)
    writer.append(0)
    shutil.copy(other / "run.h5", tmp_path / "run" / "run.h5")
    with pytest.warns(UserWarning, match="expected files of one run"):
        writer.close()
    (tmp_path / "run" / "run.h5").unlink()
    assert open_run(tmp_path / "run")["train"]["step"].values.tolist() == [0]


@pytest.mark.parametrize("value", ["{not json", "[1]", 3])
def test_a_configuration_that_is_no_json_counts_as_absent(value, tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, config={"x": 1}) as writer:
        writer.append(0)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file.attrs["config_json"] = value
    run = opened(tmp_path, "The attribute config_json is no JSON object; the configuration counts as absent.")
    assert run.attrs["config_json"] == "{}"
    assert summarize(tmp_path)["provenance"]["config"] == {}


def inspect(path):
    command = [sys.executable, "-m", "gradscope", "inspect", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_inspect_lists_damage_and_counts_one_record_as_one(tmp_path):
    run = killed_run(tmp_path, stored=0, waiting=1)
    assert "  in journals only: 2 records\n" in inspect(run).stdout
    run = killed_run(tmp_path / "other", stored=2, waiting=1)
    (run / "run.h5").unlink()
    done = inspect(run)
    assert "  in journals only: 1 record\n" in done.stdout
    assert done.stdout.endswith(
        "Damage\n  run.h5 is not there and 3 records are lost with it; put it back beside its journals.\n"
    )
    assert done.stderr == ""


def test_a_warning_on_the_command_line_is_one_plain_line(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file.attrs["schema_version"] = "1.7"
    assert inspect(tmp_path).stderr == (
        f"gradscope: warning: {tmp_path}: schema 1.7 is newer than 1.0; what is new in it is ignored.\n"
    )
