"""Runs side by side: the numbers in the sentences are those of the runs, and one seed stays one seed."""

import numpy as np
import pytest
from scipy.stats import binomtest

from gradscope.derive import difference_interval, wilson_interval
from gradscope.errors import RunFileError
from gradscope.report.contrast import contrast, progress
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"generator/0": "generator", "generator/1": "generator", "aggregator/0": "aggregator"}


def write(path, *, sampled, greedy, gram=None, policies=None, counts=None):
    policies = policies or {"generator": "shared", "aggregator": "shared"}
    with RunWriter(path, slots=SLOTS, policies=policies) as writer:
        for step in range(1, 4):
            record = None
            if gram is not None:
                if counts is None:
                    counts = {"num_rows": np.full(3, 8.0), "num_signal_rows": np.full(3, 8.0)}
                record = UpdateRecord("shared", tuple(SLOTS), np.asarray(gram, dtype=float) * step, counts)
            writer.append(step, record, metrics={"loss": 0.1})
        for step, correct in sampled:
            writer.append_evaluation(
                step, num_correct=correct, num_total=300, dataset="held_out", temperature=0.7
            )
        for step, correct in greedy:
            writer.append_evaluation(
                step, num_correct=correct, num_total=300, dataset="held_out", greedy=True
            )
    return open_run(path)


def test_wilson_and_newcombe_give_published_values():
    # Newcombe 1998 part I, table I: 81 of 263 and 15 of 148; part II, table II: 56/70 against 48/80.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert difference_interval((48, 80), (56, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = wilson_interval([8, 0, 300], [10, 20, 300])
    for place, (correct, total) in enumerate([(8, 10), (0, 20), (300, 300)]):
        expected = binomtest(correct, total).proportion_ci(0.95, method="wilson")
        assert (low[place], high[place]) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_sharpening_is_told_from_new_answers(tmp_path):
    sharp = write(tmp_path / "a", sampled=[(0, 150), (3, 230)], greedy=[(0, 232), (3, 233)])
    skill = write(tmp_path / "b", sampled=[(0, 150), (3, 230)], greedy=[(0, 160), (3, 233)])
    noise = write(tmp_path / "c", sampled=[(0, 150), (3, 155)], greedy=[(0, 160), (3, 161)])
    texts = contrast({"a": sharp, "b": skill, "c": noise})
    assert "from 0.500 to 0.767 (+0.267" in texts[0]
    assert "(sharpening)" in texts[0]
    assert "more than sharper sampling" in texts[1]
    assert "within the noise" in texts[2]


def test_differences_say_what_can_be_told(tmp_path):
    low = write(tmp_path / "low", sampled=[(0, 100), (3, 120)], greedy=[])
    high = write(tmp_path / "high", sampled=[(0, 100), (3, 240)], greedy=[])
    near = write(tmp_path / "near", sampled=[(0, 100), (3, 125)], greedy=[])
    text = " ".join(contrast({"low": low, "high": high, "near": near}))
    assert "high minus low: +0.400" in text
    assert "these two runs differ" in text
    assert "near minus low: +0.017" in text
    assert "no difference can be told" in text
    assert "is one seed" in text


def test_shares_are_those_of_the_role_gram(tmp_path):
    gram = [[4.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 3.0]]
    run = write(tmp_path / "run", sampled=[(0, 100), (3, 120)], greedy=[], gram=gram)
    text = next(line for line in contrast({"run": run}) if "policy 'shared'" in line)
    assert "generator 75% (by rows alone 67%)" in text
    assert "aggregator 25% (by rows alone 33%)" in text
    assert f"generator {np.sqrt(18):.3g}" in text
    assert "3 steps with signal" in text


def test_evaluations_are_taken_by_step_not_by_place(tmp_path):
    run = write(tmp_path / "run", sampled=[(0, 100), (3, 120)], greedy=[])
    ((setting, found),) = progress(run).items()
    assert str(setting) == "held_out, sampled at T = 0.7"
    assert (found.first, found.last) == ((100, 300), (120, 300))


def add(path, rows):
    """Further evaluations of a run, as (step, correct, data set, temperature)."""
    with RunWriter(
        path, slots=SLOTS, policies={"generator": "shared", "aggregator": "shared"}, resume_from_step=3
    ) as writer:
        for step, correct, dataset, temperature in rows:
            writer.append_evaluation(
                step, num_correct=correct, num_total=300, dataset=dataset, temperature=temperature
            )
    return open_run(path)


def test_data_sets_and_temperatures_are_never_one_series(tmp_path):
    write(tmp_path / "run", sampled=[(0, 100), (3, 120)], greedy=[])
    run = add(
        tmp_path / "run",
        [(3, 290, "easy", 0.7), (2, 10, "held_out", 1.5), (3, 30, "held_out", 1.5), (1, 280, "easy", 0.7)],
    )
    found = {str(setting): (own.first[0], own.last[0]) for setting, own in progress(run).items()}
    assert found == {
        "held_out, sampled at T = 0.7": (100, 120),
        "held_out, sampled at T = 1.5": (10, 30),
        "easy, sampled at T = 0.7": (280, 290),
    }
    text = [line for line in contrast({"run": run}) if "accuracy went" in line]
    assert len(text) == 3
    assert any("held_out, sampled at T = 1.5: accuracy went from 0.033 to 0.100" in line for line in text)


def test_runs_that_share_no_setting_are_not_compared(tmp_path):
    one = write(tmp_path / "one", sampled=[(0, 100), (3, 120)], greedy=[])
    write(tmp_path / "two", sampled=[], greedy=[(0, 100), (3, 250)])
    two = add(tmp_path / "two", [(0, 100, "easy", 0.7), (3, 290, "easy", 0.7)])
    text = contrast({"one": one, "two": two})
    assert "two minus one: no setting was evaluated in both, so nothing can be compared." in text
    assert not any("these two runs differ" in line for line in text)


def test_a_run_without_counts_has_shares_without_what_counts_alone_would_give(tmp_path):
    run = write(tmp_path / "run", sampled=[(0, 100), (3, 120)], greedy=[], gram=np.eye(3), counts={})
    text = next(line for line in contrast({"run": run}) if "policy 'shared'" in line)
    assert "energy share: generator 67%, aggregator 33%." in text


def test_a_run_without_evaluations_is_refused_in_one_line(tmp_path):
    run = write(tmp_path / "run", sampled=[(0, 100)], greedy=[])
    with pytest.raises(RunFileError, match="run: fewer than two sampled evaluations"):
        contrast({"run": run})
