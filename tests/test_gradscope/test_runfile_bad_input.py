"""What is no run, or no run that can be read, is said in one line, by every command that takes a run."""

import shutil

import h5py
import numpy as np
import pytest

from gradscope import cli
from gradscope.runfile import RunWriter


def write(path, *, num_steps=1, version=None):
    with RunWriter(path, slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        for step in range(num_steps):
            writer.append(step)
    if version is not None:
        with h5py.File(path / "run.h5", "r+") as file:
            file.attrs["schema_version"] = version


def nowhere(path):
    return "no such file or directory. Expected run.h5"


def empty_directory(path):
    path.mkdir()
    return "holds no run. Expected run.h5"


def directory_of_runs(path):
    write(path / "inner")
    return f"holds no run itself. Expected run.h5 or journals run.h5.wal.* there; did you mean {path}/inner?"


def foreign_hdf5(path):
    path.mkdir()
    with h5py.File(path / "run.h5", "w") as file:
        file["weights"] = np.zeros(3)
    return "an HDF5 file without the attribute schema_version, so not a run file"


def foreign_file(path):
    path.mkdir()
    (path / "run.h5").write_text("step,loss\n1,2\n")
    return "not a readable run file"


def empty_file(path):
    path.mkdir()
    (path / "run.h5").touch()
    return "not a readable run file"


def empty_journal(path):
    path.mkdir()
    (path / "run.h5.wal.000000").touch()
    return "there is no run.h5 and no readable header in run.h5.wal.000000"


def newer_major_version(path):
    write(path, version="2.0")
    return "written in schema 2.0, this version reads 1.x. Install a newer gradscope."


def older_major_version(path):
    write(path, version="0.9")
    return "written in schema 0.9, this version reads 1.x. Run 'gradscope migrate"


def no_version(path):
    write(path, version="first")
    return "without the attribute schema_version"


CASES = [
    nowhere, empty_directory, directory_of_runs, foreign_hdf5, foreign_file, empty_file, empty_journal,
    newer_major_version, older_major_version, no_version,
]  # fmt: skip


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2, captured
    assert captured.out == ""
    assert captured.err.startswith("gradscope: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("command", ["diagnose", "inspect"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_line_and_code_2(case, command, tmp_path, capsys):
    message = case(tmp_path / "run")
    found = refusal(capsys, command, str(tmp_path / "run"))
    assert message in found
    assert str(tmp_path / "run") in found


def test_a_run_of_no_steps_cannot_be_diagnosed_but_inspected(tmp_path, capsys):
    write(tmp_path / "run", num_steps=0)
    assert "holds neither steps nor evaluations" in refusal(capsys, "diagnose", str(tmp_path / "run"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", str(tmp_path / "run")])
    assert stop.value.code in (0, None)
    assert "Steps: 0" in capsys.readouterr().out


def test_a_file_of_another_name_is_told_by_its_own(tmp_path, capsys):
    write(tmp_path / "run")
    shutil.copy(tmp_path / "run" / "run.h5", tmp_path / "text.h5")
    (tmp_path / "text.h5").write_bytes(b"hello")
    assert f"{tmp_path}/text.h5: not a readable run file" in refusal(
        capsys, "inspect", str(tmp_path / "text.h5")
    )
