"""diagnose: plants are found and said, the rest is silent, gaps are named, failures are not hidden."""

import functools
import json

import numpy as np
import pytest
import xarray as xr

import gradscope
from gradscope import detectors, diagnose, synthetic
from gradscope.detectors import amplification, capture_words
from gradscope.detectors.finding import Finding, Skipped
from gradscope.diagnosis import asked_for, untold
from gradscope.errors import SchemaError
from gradscope.registry import Registry
from gradscope.report.text import render


@functools.cache
def made(kind, seed):
    """A run that several tests read and none changes."""
    return synthetic.make_run(kind, seed=seed, num_steps=120)


def found(run):
    return {finding.kind: finding for finding in diagnose(run).findings if finding.established}


@pytest.mark.parametrize("kind", ["cliff", "capture", "amplification"])
def test_what_was_planted_is_found_at_its_role_and_step(kind):
    errors, verdicts = [], []
    for seed in range(6):
        run, truth = made(kind, seed)
        for finding in diagnose(run).findings:
            if finding.kind == kind:
                verdicts.append(finding.established)
                errors.append(abs(finding.step - truth.step))
                assert finding.role == truth.role
                assert f"step {finding.step}" in finding.sentence
    print(f"{kind}: {len(verdicts)} of 6 seen, {sum(verdicts)} sure, off by {errors} of 120 steps")
    assert len(verdicts) >= 4
    assert sum(verdicts) >= 3
    # A single onset may be far off where the level wandered just before the change.
    assert np.median(errors) <= 5
    assert max(errors) <= 24


@pytest.mark.parametrize("kind", ["healthy", "slow_decay", "structural", "spikes"])
def test_healthy_runs_stay_silent(kind):
    alarms = [found(made(kind, seed)[0]) for seed in range(2)]
    assert alarms == [{}, {}]


def test_dominance_is_said_but_is_not_capture():
    for seed in range(4):
        for finding in diagnose(made("dominance", seed)[0]).findings:
            if finding.strength == "dominance":
                assert not finding.established
                assert "dominate" in finding.sentence
                return
    pytest.fail("no dominance in four runs")


def test_a_run_without_signal_is_said_to_have_none():
    run, _ = made("no_signal", 0)
    diagnosis = diagnose(run)
    assert [(finding.kind, finding.strength) for finding in diagnosis.findings] == [("signal", "strong")]
    assert "No signal to speak of" in diagnosis.findings[0].sentence
    verdicts = {finding.kind: finding.strength for finding in diagnosis.quiet}
    assert verdicts["capture"] == verdicts["amplification"] == "undetermined"
    assert "cannot be told" in render(diagnosis)


def test_a_short_run_without_any_signal():
    run, _ = synthetic.make_run("no_signal", seed=0, num_steps=9, num_evaluations=9)
    run["updates"]["num_signal_rows"][:] = 0
    diagnosis = diagnose(run)
    assert "0 of 864 rows (0 %)" in diagnosis.findings[0].sentence
    sentences = " ".join(finding.sentence for finding in diagnosis.quiet)
    assert "9 steps are too few: 20 are needed" in sentences


def test_signal_that_fades_is_said_and_no_verdict_rests_on_the_rest():
    diagnosis = diagnose(made("saturated", 1)[0])
    (finding,) = diagnosis.findings
    assert finding.kind == "signal"
    assert "Signal faded out" in finding.sentence
    assert "step 59" in finding.sentence
    assert finding.evidence["last_step_with_signal"] == 59


def test_signal_that_lasts_to_the_end_has_not_faded():
    run, _ = synthetic.make_run("healthy", seed=0, num_steps=20, num_evaluations=9)
    run["updates"]["num_signal_rows"][:] = 0
    run["updates"]["num_signal_rows"][np.r_[0:10, 19]] = 4
    (finding,) = [found for found in diagnose(run).findings if found.kind == "signal"]
    assert finding.sentence.startswith("Little signal:")
    assert "The last such step is step" in finding.sentence


def test_noise_without_signal_is_not_judged():
    # Gradients of rows without advantage: rounding, which points anywhere.
    run, _ = synthetic.make_run("capture", seed=1)
    run["updates"]["num_signal_rows"][20:] = 0
    diagnosis = diagnose(run)
    assert {finding.kind for finding in diagnosis.findings} == {"signal"}


def test_each_setting_is_judged_on_its_own():
    run, truth = synthetic.make_run("cliff", seed=2)
    greedy = run["eval"].to_dataset(inherit=False).copy(deep=True)
    greedy["greedy"][:] = 1
    greedy["num_correct"][:] = 390
    both = xr.concat([run["eval"].to_dataset(inherit=False), greedy], dim="evaluation")
    run["eval"] = xr.DataTree(both.assign_coords(evaluation=np.arange(both.sizes["evaluation"])))
    diagnosis = diagnose(run)
    (cliff,) = [finding for finding in diagnosis.findings if finding.kind == "cliff"]
    assert "'held_out' (sampled at T = 0.7)" in cliff.sentence
    assert cliff.step == truth.step
    (none,) = [finding for finding in diagnosis.quiet if finding.kind == "cliff"]
    assert "'held_out' (greedy)" in none.sentence


def test_missing_evaluations_count_as_missing_not_as_zero():
    run, truth = synthetic.make_run("cliff", seed=2)
    for name in ("num_correct", "num_total"):
        run["eval"][name][::7] = np.nan
    assert abs(found(run)["cliff"].step - truth.step) <= 5


def test_isolated_policies_are_skipped_by_capture_with_the_reason():
    run, _ = synthetic.make_run("healthy", seed=0, num_steps=40, num_evaluations=10, policy="isolated")
    diagnosis = diagnose(run)
    assert diagnosis.skipped == {"capture": "no policy is shared by two roles, so none can be captured"}
    assert "separate policies share no coordinates" in render(diagnosis)


def test_a_workflow_without_copies_is_skipped_by_amplification():
    run, _ = synthetic.make_run("healthy", seed=0, num_steps=40, num_evaluations=10, roles={"a": 1, "b": 1})
    assert "no role has two slots" in diagnose(run).skipped["amplification"]


def test_a_log_of_evaluations_alone_is_judged_as_far_as_it_goes():
    run, truth = synthetic.make_run("cliff", seed=2)
    bare = xr.DataTree.from_dict(
        {"/": xr.Dataset(attrs=run.attrs), "/eval": run["eval"].to_dataset(inherit=False)}
    )
    diagnosis = diagnose(bare)
    assert [finding.step for finding in diagnosis.findings] == [truth.step]
    assert set(diagnosis.skipped) == {"capture", "amplification", "signal"}
    assert not diagnosis.broken
    assert "/updates/gram" in diagnosis.skipped["capture"]
    assert "the log holds no per-slot Grams" in render(diagnosis)


def test_an_empty_run_is_no_failure():
    diagnosis = diagnose(xr.DataTree())
    assert not diagnosis.findings
    assert not diagnosis.broken
    assert set(diagnosis.skipped) == set(detectors.DETECTORS)


def test_a_detector_that_fails_hides_neither_itself_nor_others(monkeypatch):
    def broken(run):
        """Fails."""
        return 1 / 0

    monkeypatch.setattr(detectors, "broken", broken, raising=False)
    table = {"broken": "gradscope.detectors:broken", "cliff": "gradscope.detectors.cliff:detect"}
    monkeypatch.setattr("gradscope.diagnosis.DETECTORS", Registry("detector", table))
    diagnosis = diagnose(made("cliff", 2)[0])
    assert [finding.kind for finding in diagnosis.findings] == ["cliff"]
    assert diagnosis.skipped["broken"] == "failed with ZeroDivisionError: division by zero"
    assert "1 / 0" in diagnosis.broken["broken"]
    assert "a bug of ours" in render(diagnosis)


def test_findings_never_claim_a_cause():
    for kind in ("cliff", "capture", "amplification", "dominance", "no_signal", "saturated"):
        diagnosis = diagnose(made(kind, 1)[0])
        text = render(diagnosis)
        assert "because" not in text
        assert "caused" not in text
        assert "what made what" in text
        assert all(finding.sentence.endswith(".") for finding in (*diagnosis.findings, *diagnosis.quiet))


def test_the_text_has_its_parts_in_order_and_fits_a_terminal():
    text = render(diagnose(made("amplification", 1)[0], name="runs/x"))
    lines = text.splitlines()
    assert lines[0] == "Diagnosis of runs/x"
    titles = ["Found", "Looked for and not found", "Not looked for", "What this log cannot answer"]
    assert [line for line in lines[1:] if line and not line.startswith(" ")] == titles
    assert max(map(len, lines)) <= 100


def test_a_resume_close_to_the_onset_is_mentioned():
    run, truth = synthetic.make_run("cliff", seed=2)
    segments = run["segments"].to_dataset(inherit=False)
    second = segments.assign_coords(segment=[1]).assign(start_step=("segment", [float(truth.step)]))
    run["segments"] = xr.DataTree(xr.concat([segments, second], dim="segment"))
    assert f"resumed at step {truth.step}" in found(run)["cliff"].sentence
    assert "resumed" not in found(made("cliff", 2)[0])["cliff"].sentence


def test_json_is_as_designed_and_has_no_nan():
    diagnosis = diagnose(made("no_signal", 0)[0], name="x")
    data = json.loads(diagnosis.to_json(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    keys = ["run", "findings", "not_found", "skipped", "limits", "schema_version", "gradscope_version"]
    assert list(data) == keys
    assert data["limits"] == list(diagnosis.limits)
    quiet = {finding["kind"]: finding["strength"] for finding in data["not_found"]}
    assert quiet == {"cliff": "none", "capture": "undetermined", "amplification": "undetermined"}
    assert (data["run"], data["schema_version"]) == ("x", "1.0")
    assert data["gradscope_version"] == gradscope.__version__
    fields = ["kind", "role", "step", "strength", "evidence", "sentence"]
    assert [list(finding) for finding in data["findings"]] == [fields]
    assert all(list(finding) == fields and finding["sentence"] for finding in data["not_found"])


def test_missing_numbers_are_null_in_json():
    finding = Finding("x", None, np.int64(3), "possible", {"a": float("nan"), "b": np.float32(0.5)}, "S.")
    diagnosis = gradscope.Diagnosis("x", (finding,), (), {}, {}, (), "1.0")
    (plain,) = json.loads(diagnosis.to_json())["findings"]
    assert plain["evidence"] == {"a": None, "b": 0.5}
    assert plain["step"] == 3


@pytest.mark.parametrize(
    ("kind", "strength", "counts"),
    [
        ("cliff", "strong", True), ("cliff", "cliff", True), ("cliff", "possible", False),
        ("capture", "capture", True), ("capture", "dominance", False), ("amplification", "possible", False),
    ],
)  # fmt: skip
def test_only_verdicts_of_the_kinds_level_are_asked_for(kind, strength, counts):
    diagnosis = gradscope.Diagnosis("x", (Finding(kind, None, 1, strength),), (), {}, {}, (), "1.0")
    assert bool(asked_for(diagnosis, [kind])) is counts
    assert not asked_for(diagnosis, ["another"])


def test_a_path_is_opened(tmp_path):
    synthetic.write_run(tmp_path / "own", "cliff", seed=2, num_steps=40, num_evaluations=20)
    for path in (tmp_path / "own", str(tmp_path / "own" / "run.h5")):
        diagnosis = diagnose(path)
        assert diagnosis.run == str(path)
        assert diagnosis.findings == diagnose(gradscope.open_run(path)).findings
    assert diagnose(tmp_path / "own", name="x").run == "x"


@pytest.mark.parametrize("run", [None, 3, {}])
def test_what_is_no_run_is_refused(run):
    with pytest.raises(SchemaError, match="takes an opened run"):
        diagnose(run)


def test_dominance_has_its_own_word_for_a_machine():
    finding = next(
        finding
        for seed in range(6)
        for finding in diagnose(made("dominance", seed)[0]).findings
        if finding.strength == "dominance"
    )
    assert finding.kind == "capture"
    assert finding.evidence["verdict"] == "dominance"
    assert finding.evidence["chance"] <= 0.01
    assert finding.evidence["window_steps"] == 24
    assert "from the first 24 to the last 24 steps (medians over those with a gradient)" in finding.sentence
    assert "in random order change as much" in finding.sentence


def test_each_verdict_quotes_its_own_rate():
    assert len(set(capture_words.FALSE_ALARMS.values())) == 3
    for kind, rates in (("dominance", capture_words.FALSE_ALARMS), ("capture", capture_words.FALSE_ALARMS),
                        ("amplification", amplification.FALSE_ALARMS)):  # fmt: skip
        for seed in range(4):
            for finding in diagnose(made(kind, seed)[0]).findings:
                if finding.strength in rates:
                    assert rates[finding.strength] in finding.sentence


def test_what_could_not_be_told_is_known():
    assert untold(diagnose(made("no_signal", 0)[0]), ["capture", "cliff", "signal"]) == ["capture"]
    assert untold(diagnose(xr.DataTree()), ["cliff"]) == ["cliff"]


def test_skipped_carries_its_reason():
    assert str(Skipped("no values")) == "no values"
