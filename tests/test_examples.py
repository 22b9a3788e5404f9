"""The shipped reference runs are small, readable, and all five figures are drawn from them."""

import csv
from pathlib import Path

import pytest

from gradscope import cli, diagnose, open_run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUNS = sorted(folder.parent for folder in EXAMPLES.glob("*/run.h5"))
FIGURES = ("accuracy", "gradient_norms", "shares", "amplification", "alignment")


def test_three_seeds_of_both_policies_in_at_most_4_megabytes():
    cells = {path.name.rpartition("-seed")[0] for path in RUNS}
    assert cells == {"voting-shared-stack_code", "voting-isolated-stack_code"}
    assert len(RUNS) == 6
    assert sum(file.stat().st_size for file in EXAMPLES.rglob("*")) < 4e6


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_example_is_whole_and_can_be_judged(path):
    run = open_run(path)
    assert run["train"]["step"].values.tolist() == list(range(1, 101))
    evaluated = run["eval"].to_dataset()
    rise = (evaluated["num_correct"] / evaluated["num_total"]).where(evaluated["greedy"] == 0, drop=True)
    assert float(rise[-1] - rise[0]) > 0.1
    diagnosis = diagnose(run)
    assert not diagnosis.broken
    looked = {finding.kind for finding in (*diagnosis.findings, *diagnosis.quiet)}
    assert {"cliff", "amplification", "signal"} <= looked
    assert ("capture" in looked) == ("shared" in path.name)


def test_all_figures_are_rebuilt_from_the_examples(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["figures", *map(str, RUNS), "-o", str(tmp_path)])
    assert stop.value.code == 0
    assert capsys.readouterr().err == ""
    for name in FIGURES:
        assert {file.suffix for file in tmp_path.glob(f"{name}.*")} == {".pdf", ".png", ".csv"}
        with (tmp_path / f"{name}.csv").open() as stream:
            assert len(list(csv.DictReader(stream))) > 20


def test_a_fall_in_the_last_evaluation_is_not_said_to_have_lasted():
    findings = diagnose(open_run(EXAMPLES / "voting-shared-stack_code-seed1")).findings
    (cliff,) = [found for found in findings if found.kind == "cliff" and found.established]
    assert "accuracy fell at step 100, the last one evaluated, from" in cliff.sentence
    assert "stayed down" not in cliff.sentence
    assert "rests on the final evaluation alone" in cliff.sentence
