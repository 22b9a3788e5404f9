"""A run of an older schema is brought to the present one by registered steps; 1.0 is the first version."""

import h5py
import numpy as np
import pytest

from gradscope import cli
from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, migrations, open_run
from gradscope.runfile.migrations import Migration, migrate


@pytest.fixture
def run(tmp_path):
    """A run as an imagined version 0.9 would have it, which called the loss otherwise."""
    with RunWriter(tmp_path / "run", slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        for step in range(5):
            writer.append(step, metrics={"loss": step / 2})
    with h5py.File(tmp_path / "run" / "run.h5", "r+") as file:
        file.move("train/loss", "train/objective")
        file.attrs["schema_version"] = "0.9"
    return tmp_path / "run"


def rename(file):
    file.move("train/objective", "train/loss")


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_the_present_version_needs_nothing(tmp_path, capsys):
    with RunWriter(tmp_path, slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        writer.append(0)
    before = (tmp_path / "run.h5").read_bytes()
    assert call(capsys, "migrate", str(tmp_path)) == (0, f"{tmp_path}: already 1.0\n", "")
    assert (tmp_path / "run.h5").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.h5"]


def test_an_older_run_is_refused_with_what_to_do(run):
    with pytest.raises(RunFileError) as caught:
        open_run(run)
    file = run / "run.h5"
    assert str(caught.value) == (
        f"{file}: written in schema 0.9, this version reads 1.x. Run 'gradscope migrate {file}'."
    )


def test_an_older_run_is_migrated_and_kept(run, monkeypatch, capsys):
    monkeypatch.setitem(migrations.MIGRATIONS, "0.8", Migration("0.9", lambda file: None))
    monkeypatch.setitem(migrations.MIGRATIONS, "0.9", Migration("1.0", rename))
    before = (run / "run.h5").read_bytes()
    code, out, _ = call(capsys, "migrate", str(run))
    assert (code, out) == (0, f"{run}: 0.9 -> 1.0; the old file is {run}/run.h5.schema-0.9\n")
    np.testing.assert_array_equal(open_run(run)["train/loss"], np.arange(5) / 2)
    assert (run / "run.h5.schema-0.9").read_bytes() == before
    with RunWriter(run, slots={"a/0": "a"}, policies={"a": "p"}, resume_from_step=4) as writer:
        writer.append(5)
    assert open_run(run)["train/step"].values.tolist() == list(range(6))


def test_a_version_that_no_step_leads_away_from(run, capsys):
    code, out, err = call(capsys, "migrate", str(run))
    assert (code, out) == (2, "")
    assert err.startswith("gradscope: no migration leads away from schema 0.9. Known: none.")
    assert err.count("\n") == 1


def test_a_step_that_fails_changes_nothing(run, monkeypatch):
    def fail(file):
        del file["train/objective"]
        raise KeyError("oh")

    monkeypatch.setitem(migrations.MIGRATIONS, "0.9", Migration("1.0", fail))
    before = (run / "run.h5").read_bytes()
    with pytest.raises(KeyError):
        migrate(run)
    assert (run / "run.h5").read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "run.h5"]


def test_journals_of_the_older_version_are_not_left_behind(run, monkeypatch):
    monkeypatch.setitem(migrations.MIGRATIONS, "0.9", Migration("1.0", rename))
    (run / "run.h5.wal.000001").write_bytes(b"rows of 0.9")
    with pytest.raises(RunFileError, match=r"has journals of schema 0\.9 beside run\.h5"):
        migrate(run)


def test_a_run_that_is_being_written_is_not_migrated(tmp_path):
    with RunWriter(tmp_path, slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        writer.append(0)
        writer.compact(wait=True)
        with pytest.raises(RunFileError, match="is writing this run"):
            migrate(tmp_path)
