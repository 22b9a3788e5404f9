"""The script that measures on an accelerator runs anywhere, small."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_probes.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_probes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_probes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_probes"]


def test_every_mode_of_a_case(script, tmp_path, capsys):
    path = tmp_path / "probes.json"
    arguments = ["--tiny", "--device", "cpu", "--turns", "1", "--json", str(path)]
    lines = script.main([*arguments, "--cases", "32x1024 r=16 K=4 bf16"])
    assert [line["mode"] for line in lines] == list(script.MODES)
    assert all(line["milliseconds"] > 0 for line in lines)
    assert lines[0]["ratio"] == 1
    assert lines[1]["aim_bytes"] < lines[3]["aim_bytes"]
    found = json.loads(path.read_text())
    assert found["lines"] == lines
    assert found["errors"] == {}
    assert len(found["checks"]) == 8
    assert max(error for name, error in found["checks"].items() if "float32" in name) < 1e-6
    assert capsys.readouterr().out.count("| 8x12 r=16 K=4 bf16 |") == len(script.MODES)


def test_checkpointing_and_modes_by_name(script):
    arguments = ["--tiny", "--device", "cpu", "--turns", "1", "--cases", "checkpointing", "--modes", "fused"]
    arguments.append("--no-check")
    assert [line["mode"] for line in script.main(arguments)] == ["plain", "fused"]


def test_a_case_that_fails_leaves_the_others(script, tmp_path, capsys, monkeypatch):
    cases = script.all_cases()[:2]
    monkeypatch.setattr(script, "all_cases", lambda: [script.replace(cases[0], num_slots=0), cases[1]])
    path = tmp_path / "probes.json"
    arguments = ["--tiny", "--device", "cpu", "--turns", "1", "--modes", "fused", "--no-check"]
    lines = script.main([*arguments, "--json", str(path)])
    assert [line["mode"] for line in lines] == ["plain", "fused"]
    assert list(json.loads(path.read_text())["errors"]) == ["8x12 r=64 K=0 bf16"]
    assert "Traceback" in capsys.readouterr().err


def test_cases_are_those_of_the_aims(script, capsys):
    assert script.main(["--list", "--cases", "16x512"]) == []
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 8
    assert len(script.all_cases()) == 17


def test_no_case_begins_after_the_time(script, capsys):
    assert (
        script.main(["--tiny", "--device", "cpu", "--seconds", "-1", "--cases", "r=64", "--no-check"]) == []
    )
    assert capsys.readouterr().err.count("left out for want of time") == 8
