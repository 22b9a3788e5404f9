"""`gradscope diagnose`: text, JSON, exit codes and one-line errors."""

import json

import h5py
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


@pytest.mark.parametrize("kinds", ["", " , "])
def test_no_kind_at_all_is_refused(runs, capsys, kinds):
    code, out, err = call(capsys, runs / "cliff", "--fail-on", kinds)
    assert (code, out) == (2, "")
    assert err.startswith(f"gradscope: --fail-on '{kinds}' names no kind of finding. Allowed: cliff, capture")


def test_what_could_not_be_told_passes_with_a_warning(tmp_path, capsys):
    synthetic.write_run(tmp_path / "run", "no_signal", seed=0, num_steps=30, num_evaluations=10)
    code, _, err = call(capsys, tmp_path / "run", "--fail-on", "capture,cliff")
    assert code == 0
    assert err == (
        "gradscope: warning: --fail-on capture: it could not be told (too little data, see above).\n"
    )
    synthetic.write_run(
        tmp_path / "own", "healthy", seed=0, num_steps=9, num_evaluations=9, policy="isolated"
    )
    code, _, err = call(capsys, tmp_path / "own", "--json", "--fail-on", "capture")
    assert code == 0
    assert "capture: it could not be told (no policy is shared by two roles, so none can be" in err


def test_damaged_content_is_no_bug(tmp_path, capsys):
    synthetic.write_run(tmp_path / "run", "cliff", seed=2, num_steps=40, num_evaluations=20)
    with h5py.File(tmp_path / "run" / "run.h5", "r+") as file:
        file["updates/gram"][3, 1, 1] = -1.0
    code, out, err = call(capsys, tmp_path / "run")
    assert (code, err) == (0, "")
    assert "capture: /updates/gram has a negative squared norm at update 3" in out
    assert "ccuracy cliff on 'held_out'" in out


def test_the_help_says_what_counts(capsys):
    _, out, _ = call(capsys, "--help")
    assert "nor does 'dominance'" in " ".join(out.split())


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
