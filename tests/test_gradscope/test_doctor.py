"""`gradscope doctor` finds what is there and says what is not."""

import errno
import json
import os
import subprocess

import pytest

from gradscope import cli
from gradscope.commands import doctor
from gradscope.runfile import durable, promises


def run_doctor(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--json", *arguments])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return stop.value.code, {check["name"]: check for check in checks}


def test_a_whole_installation_is_fine(tmp_path, capsys):
    code, checks = run_doctor(capsys, "--folder", str(tmp_path))
    assert code == 0
    assert checks["embedded model"]["ok"]
    assert checks["files: kind"]["found"].endswith(f" under {tmp_path}")
    assert checks["files: room"]["found"].endswith(" GB free")
    files = [name.removeprefix("files: ") for name in checks if name.startswith("files: ")]
    assert files[2:] == [
        "append in one write",
        "replace a file whole",
        "others see the new file",
        "sync files and folders",
        "touch a file",
    ]
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


def fail(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def rename_by_copying(path, target):
    """As a file system whose rename is no single step: those who have the old file open see the new one."""
    target.write_bytes(path.read_bytes())
    path.unlink()


@pytest.mark.parametrize(
    ("call", "broken", "name", "found"),
    [
        ("append", lambda descriptor, data: 1, "append in one write", "came back short"),
        ("rename", rename_by_copying, "replace a file whole", "does not take the place"),
        ("rename", lambda path, target: None, "others see the new file", "after a rename"),
        ("sync", fail, "sync files and folders", "Input/output error"),
    ],
)
def test_a_file_system_that_breaks_a_promise_fails(call, broken, name, found, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(durable, call, broken)
    code, checks = run_doctor(capsys, "--folder", str(tmp_path))
    assert code == 1
    assert not checks[f"files: {name}"]["ok"]
    assert found in checks[f"files: {name}"]["found"]
    assert "local disk" in checks[f"files: {name}"]["advice"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_in_memory_is_told(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        kind, room, *others = promises.check_folder(folder)
        assert kind.found == f"tmpfs under {folder}"
        assert "gone after a restart" in kind.advice
        assert room.advice.startswith("Little room")
        assert all(promise.is_kept for promise in others)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)
