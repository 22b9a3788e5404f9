"""`gradscope diagnose`: text, JSON, exit codes and one-line errors."""

import json

import pytest

from gradscope import cli, detectors, synthetic
from gradscope.registry import Registry


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for kind, seed in (("cliff", 2), ("healthy", 0)):
        synthetic.write_run(folder / kind, kind, seed=seed)
    return folder


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["diagnose", *map(str, arguments)])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_text(runs, capsys):
    code, out, err = call(capsys, runs / "cliff")
    assert (code, err) == (0, "")
    assert "accuracy cliff on 'held_out'" in out
    assert out.startswith(f"Diagnosis of {runs / 'cliff'}\n")


def test_json_is_one_object(runs, capsys):
    code, out, _ = call(capsys, runs / "cliff" / "run.h5", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["run"] == str(runs / "cliff" / "run.h5")
    assert [finding["kind"] for finding in data["findings"]] == ["cliff"]


@pytest.mark.parametrize(
    ("run", "kinds", "code"),
    [
        ("cliff", "cliff", 1),
        ("cliff", "capture, cliff", 1),
        ("cliff", "capture,amplification", 0),
        ("healthy", "cliff,capture,amplification", 0),
    ],
)
def test_fail_on(runs, capsys, run, kinds, code):
    assert call(capsys, runs / run, "--fail-on", kinds)[0] == code


def test_an_unknown_kind_gets_the_nearest_name(runs, capsys):
    code, out, err = call(capsys, runs / "cliff", "--fail-on", "clif")
    assert (code, out) == (2, "")
    assert err.startswith("gradscope: --fail-on: unknown kind of finding 'clif'. Did you mean 'cliff'?")
    assert err.count("\n") == 1


def test_a_run_that_is_not_there_is_one_line(tmp_path, capsys):
    code, _, err = call(capsys, tmp_path / "nothing")
    assert code == 2
    assert err.count("\n") == 1
    assert "no such file or directory" in err


def test_a_failing_detector_is_a_bug_with_its_traceback(runs, capsys, monkeypatch):
    def broken(run):
        """Fails."""
        raise RuntimeError("oh")

    monkeypatch.setattr(detectors, "broken", broken, raising=False)
    table = {"broken": "gradscope.detectors:broken", "cliff": "gradscope.detectors.cliff:detect"}
    monkeypatch.setattr("gradscope.diagnosis.DETECTORS", Registry("detector", table))
    code, out, err = call(capsys, runs / "cliff")
    assert code == 3
    assert "accuracy cliff" in out
    assert "RuntimeError: oh" in err
