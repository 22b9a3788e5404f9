"""What can be saved of damaged runs and foreign HDF5 files is saved, without a wrong value."""

import json
import shutil
import warnings

import h5py
import numpy as np
import pytest

from gradscope import cli
from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, frames, open_run, salvaging
from gradscope.runfile.repair import repair
from gradscope.runfile.superblock import lookup3

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}
MODULES = [f"m.{n}" for n in range(80)]


def values(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(2, 2)), rng.random((2, 80)).astype("f4")


def append(writer, steps):
    for step in steps:
        gram, norms = values(step)
        writer.append(step, UpdateRecord("p", tuple(SLOTS), gram), metrics={"loss": gram[0, 0]})
        writer.append_modules(step, slots=list(SLOTS), modules=MODULES, grad_norm=norms)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run of 220 steps, of which the last 20 are in a journal."""
    path = tmp_path_factory.mktemp("sound")
    with RunWriter(path / "live", slots=SLOTS, policies=POLICIES) as writer:
        append(writer, range(200))
        writer.compact(wait=True)
        append(writer, range(200, 220))
        writer._recorder._log.finish_compaction()
        shutil.copytree(path / "live", path / "run", ignore=shutil.ignore_patterns("*.lock.*"))
    return path / "run"


@pytest.fixture
def run(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def repaired(path, **options):
    """Repairs and checks that the original is untouched and no value is wrong; returns report and run."""
    before = content_of(path)
    done = repair(path, **options)
    after = content_of(path)
    assert {name: data for name, data in after.items() if name in before} == before
    assert set(after) - set(before) == {"run.repaired.h5"}
    run = open_run(done.target)
    for name, axis in (("updates/gram", 0), ("modules/grad_norm", 1)):
        if name in run:
            group = run[name.split("/")[0]].to_dataset()
            for step, found in zip(group["step"].values, run[name].values, strict=True):
                good = np.isnan(found) | (found == values(step)[axis])
                assert good.all(), f"{name} at step {step}"
    return done, run


def test_a_sound_run_is_copied_whole(run):
    done, copy = repaired(run)
    assert done.is_run
    assert done.lost == ()
    assert copy["train/step"].values.tolist() == list(range(220))
    assert not np.isnan(copy["modules/grad_norm"].values).any()
    assert copy.attrs["run_id"] == open_run(run).attrs["run_id"]


@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.8, 0.9, 0.97, 0.999])
def test_a_run_file_cut_short_beside_whole_journals(run, fraction, monkeypatch):
    monkeypatch.setattr(salvaging, "PATIENCE_SECONDS", 3.0)  # one of these makes HDF5 2.0 hang
    data = (run / "run.h5").read_bytes()
    (run / "run.h5").write_bytes(data[: int(fraction * len(data))])
    with pytest.raises(RunFileError):
        open_run(run)
    done, copy = repaired(run)
    steps = copy["train/step"].values.tolist()
    assert set(range(200, 220)) <= set(steps)
    assert any("bytes are missing at the end" in sentence for sentence in done.lost)


def test_a_file_with_one_damaged_chunk_keeps_the_others(run):
    with h5py.File(run / "run.h5") as file:
        dataset = file["modules/grad_norm"]
        place = dataset.id.get_chunk_info(1)
        size = dataset.chunks[0]
    data = bytearray((run / "run.h5").read_bytes())
    data[place.byte_offset + 5 : place.byte_offset + 50] = bytes(45)
    (run / "run.h5").write_bytes(data)
    done, copy = repaired(run)
    missing = np.isnan(copy["modules/grad_norm"].values).all(axis=(1, 2))
    assert np.flatnonzero(missing).tolist() == list(range(size, 2 * size))
    assert f"/modules/grad_norm: rows {size} to {2 * size - 1} of" in " ".join(done.lost)
    assert copy["train/step"].values.tolist() == list(range(220))


def test_journals_without_their_file_and_with_damage(run):
    (run / "run.h5").unlink()
    (journal,) = run.glob("run.h5.wal.*")
    data = bytearray(journal.read_bytes())
    whole, _ = frames.scan(bytes(data))
    data[sum(len(frames.encode(frame)) for frame in whole[:10]) + 40] ^= 1
    journal.write_bytes(data)
    done, copy = repaired(run)
    steps = copy["train/step"].values.tolist()
    assert steps[-1] == 219
    assert steps[0] >= 200
    assert any("is lost from the journals" in sentence for sentence in done.lost)
    assert any("run.h5 is not there" in sentence for sentence in done.lost)


def test_a_run_file_that_is_no_hdf5_any_more(run):
    (run / "run.h5").write_bytes(b"\0" * 10_000)
    done, copy = repaired(run)
    assert set(copy["train/step"].values.tolist()) == set(range(200, 220))
    assert any(sentence.startswith("the whole file") for sentence in done.lost)


def test_a_foreign_file_that_was_never_closed(tmp_path):
    """As trainers that log with libver='latest' leave it: HDF5 refuses it for a flag."""
    source, killed = tmp_path / "source.h5", tmp_path / "killed.h5"
    expected = np.random.default_rng(0).normal(size=(500, 3))
    with h5py.File(source, "w", libver="latest") as file:
        dataset = file.create_dataset("log/loss", data=expected, chunks=(64, 3))
        dataset.attrs["units"] = "nat"
        file.flush()
        shutil.copy(source, killed)
    with pytest.raises(OSError, match="already open for write"):
        h5py.File(killed)
    before = killed.read_bytes()
    assert int.from_bytes(before[44:48], "little") == lookup3(before[:44])
    done = repair(killed)
    assert not done.is_run
    assert "its writer did not close it" in done.lost[0]
    assert killed.read_bytes() == before
    with h5py.File(tmp_path / "killed.repaired.h5") as file:
        np.testing.assert_array_equal(file["log/loss"], expected)
        assert file["log/loss"].attrs["units"] == "nat"


@pytest.mark.parametrize("chunks", [None, (50,)])
def test_rows_that_lay_behind_the_cut_are_missing_not_zero(tmp_path, chunks):
    path = tmp_path / "cut.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1.0, 5001), chunks=chunks, fillvalue=np.nan)
    path.write_bytes(path.read_bytes()[:-9000])
    done = repair(path)
    with h5py.File(done.target) as file:
        found = file["x"][...]
    there = ~np.isnan(found)
    np.testing.assert_array_equal(found[there], np.arange(1.0, 5001)[there])
    assert 0 < there.sum() < 5000
    assert any("/x: rows" in sentence for sentence in done.lost)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["repair", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_the_command_says_what_was_saved_and_lost(run, capsys, tmp_path):
    code, out, _ = call(capsys, str(run), "-o", str(tmp_path / "new.h5"))
    assert code == 0
    assert out.startswith(f"{tmp_path}/new.h5: a run\nSaved\n")
    assert "  220 rows of /train\n" in out
    assert out.endswith("Lost: nothing\n")
    code, out, _ = call(capsys, str(run), "--json")
    assert json.loads(out)["is_run"]


@pytest.mark.parametrize("name", ["gone", "text.h5", "empty.h5"])
def test_what_cannot_be_saved_is_one_line(name, tmp_path, capsys):
    (tmp_path / "text.h5").write_text("hello\n" * 100)
    (tmp_path / "empty.h5").write_bytes(b"")
    code, out, err = call(capsys, str(tmp_path / name))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("*.repaired.h5"))


def test_a_new_file_never_takes_the_place_of_one_that_is_there(run, capsys):
    assert call(capsys, str(run))[0] == 0
    code, _, err = call(capsys, str(run))
    assert code == 2
    assert "is there already" in err
    assert call(capsys, str(run), "-o", str(run / "run.h5"))[0] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_damaged_files_give_no_wrong_value(run, monkeypatch):
    monkeypatch.setattr(salvaging, "PATIENCE_SECONDS", 3.0)
    data = (run / "run.h5").read_bytes()
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100):
            cut = bytearray(data[: rng.integers(len(data) // 2, len(data) + 1)])
            for at in rng.integers(2048, len(cut), rng.integers(0, 4)):
                cut[at : at + 64] = rng.bytes(64)
            (run / "run.h5").write_bytes(cut)
            done, _ = repaired(run)
            done.target.unlink()
