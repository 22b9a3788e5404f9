"""Evaluation curves reach a verdict through the importer; repeats and disorder of steps do not matter."""

import json

import numpy as np
import pytest

import gradscope
from gradscope.importers.importing import import_run

REAL = {
    "Eval-Opt-IP-1.7B-Math": ("none", 30),
    "Orch-Workers-IP-1.7B-Math": ("strong", 29),
    "Voting-IP-1.7B-Math": ("strong", 20),
    "Voting-SP-1.7B-Math": ("none", 28),
}
"""Verdict, and how many different steps the curve has."""


def cliff_of(path):
    diagnosis = gradscope.diagnose(path)
    return next(f for f in (*diagnosis.findings, *diagnosis.quiet) if f.kind == "cliff"), diagnosis


@pytest.mark.parametrize("name", REAL)
def test_the_real_curves(real_data, tmp_path, name):
    source = real_data / "evaluation_curves" / f"{name}.json"
    made = import_run(source, tmp_path / "run.h5")
    finding, diagnosis = cliff_of(tmp_path / "run.h5")
    verdict, num_steps = REAL[name]
    assert (made.format, made.num_steps) == ("evaluations", 0)
    assert made.num_evaluations == len(json.loads(source.read_text())["step"])
    assert (finding.strength, finding.evidence["num_evaluations"]) == (verdict, num_steps)
    assert set(diagnosis.skipped) == {"capture", "amplification", "signal"}
    assert any("evaluations only" in limit for limit in diagnosis.limits)


def write_results(path, steps, correct, **more):
    """Writes the reference study's eval_results.jsonl."""
    with path.open("w") as file:
        for step, right in zip(steps, correct, strict=True):
            counts = {"num_correct": int(right), "num_total": 1412, "accuracy": right / 1412}
            cell = {"share_policy": False, "workflow_type": "voting", **more}
            file.write(json.dumps({"checkpoint_step": int(step), **counts, **cell}) + "\n")


@pytest.mark.parametrize(("fall", "verdict"), [(0, "none"), (170, "strong")])
def test_results_in_any_order_and_with_repeats(tmp_path, fall, verdict):
    rng = np.random.default_rng(3)
    steps = np.arange(10, 300, 10)
    chance = np.where(steps > 200, 800 - fall, 800) / 1412
    correct = rng.binomial(1412, chance)
    order = rng.permutation(len(steps))
    again = np.append(order, [order[4]] * 3)  # evaluated again, to other counts
    counts = correct[again]
    counts[-1] += 9
    write_results(tmp_path / "eval_results.jsonl", steps[again], counts)
    made = import_run(tmp_path / "eval_results.jsonl", tmp_path / "run.h5")
    finding, _ = cliff_of(tmp_path / "run.h5")
    assert made.num_evaluations == len(again)
    assert finding.evidence["num_evaluations"] == len(steps)
    assert finding.strength == verdict


def test_results_of_several_runs_are_told_apart(tmp_path):
    file = tmp_path / "eval_results.jsonl"
    write_results(tmp_path / "one", [10, 20], [700, 710])
    write_results(tmp_path / "two", [10, 20], [600, 610], share_policy=True)
    file.write_text((tmp_path / "one").read_text() + (tmp_path / "two").read_text())
    with pytest.raises(
        gradscope.GradscopeError, match=r"2 runs by 'share_policy'.*--where share_policy=False"
    ):
        import_run(file, tmp_path / "never.h5")
    import_run(file, tmp_path / "run.h5", where={"share_policy": "True"})
    assert gradscope.open_run(tmp_path / "run.h5")["eval"]["num_correct"].values.tolist() == [600, 610]
