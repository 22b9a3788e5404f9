"""`gradscope doctor` finds what is there and says what is not."""

import json

import pytest

from gradscope import cli
from gradscope.commands import doctor


def run_doctor(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--json", *arguments])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return stop.value.code, {check["name"]: check for check in checks}


def test_a_whole_installation_is_fine(tmp_path, capsys):
    code, checks = run_doctor(capsys, "--folder", str(tmp_path))
    assert code == 0
    assert checks["embedded model"]["ok"]
    assert checks["files: replace a file whole"]["found"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_reported(tmp_path, capsys):
    code, checks = run_doctor(capsys, "--folder", str(tmp_path / "nowhere"))
    assert code == 1
    assert "is not a folder" in checks["file system"]["found"]


def test_without_torch_only_training_is_missing(monkeypatch, tmp_path, capsys):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else real(name))
    code, checks = run_doctor(capsys, "--folder", str(tmp_path))
    assert code == 0
    assert checks["packages: diagnosis"]["ok"]
    assert checks["packages: training"]["advice"].startswith("missing: torch. Run 'pip install \".[train]\"'")


def test_a_file_system_that_breaks_its_promise_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "_replaces", lambda scratch: False)
    code, checks = run_doctor(capsys, "--folder", str(tmp_path))
    assert code == 1
    assert "local disk" in checks["files: replace a file whole"]["advice"]
