"""find_cliff: planted cliffs at the right place, silence elsewhere, real curves, and what must not matter."""

import json

import numpy as np
import pytest

from gradscope import find_cliff, synthetic
from gradscope.detectors import cliff as detector
from gradscope.errors import GradscopeError
from gradscope.stats.two_window import fall_p_value, strongest_fall


def sudden(seed=0, length=30, onset=20, num_total=400, before=0.7, after=0.4):
    generator = np.random.default_rng(seed)
    return generator.binomial(num_total, np.where(np.arange(length) < onset, before, after))


def test_a_sudden_fall_is_found_where_it_happens():
    for seed in range(20):
        cliff = find_cliff(sudden(seed), 400, step=10 * np.arange(30))
        assert (cliff.verdict, cliff.index, cliff.step) == ("strong", 20, 200)
        assert cliff.depth == pytest.approx(0.3, abs=0.06)
        assert cliff.depth == cliff.before - cliff.after
        assert cliff.interval[0] < cliff.depth < cliff.interval[1]
        assert cliff.p_value == 1 / 1000


def test_the_interval_covers_the_true_depth():
    covered = 0
    for seed in range(200):
        low, high = find_cliff(sudden(seed), 400).interval
        covered += low <= 0.3 <= high
    print(f"95 % interval of a depth of 0.3 covers it in {covered} of 200")
    assert 180 <= covered <= 200


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("Voting-IP-1.7B-Math", "strong"),
        ("Orch-Workers-IP-1.7B-Math", "strong"),
        ("Voting-SP-1.7B-Math", "none"),
        ("Eval-Opt-IP-1.7B-Math", "none"),
    ],
)
def test_real_curves(real_data, name, verdict):
    curve = json.loads((real_data / "evaluation_curves" / f"{name}.json").read_text())
    cliff = find_cliff(curve["num_correct"], curve["num_total"], step=curve["step"])
    assert cliff.verdict == verdict
    assert curve["step"][cliff.index] == cliff.step


def test_order_of_rows_does_not_matter_and_the_index_is_the_callers():
    correct, steps = sudden(), 10 * np.arange(30)
    shuffled = np.random.default_rng(1).permutation(30)
    straight = find_cliff(correct, 400, step=steps)
    mixed = find_cliff(correct[shuffled], 400, step=steps[shuffled])
    assert mixed.step == straight.step
    assert steps[shuffled][mixed.index] == mixed.step
    assert (mixed.score, mixed.depth, mixed.p_value) == (straight.score, straight.depth, straight.p_value)


def test_identical_repeats_are_one_evaluation_and_differing_ones_are_pooled():
    correct, steps, total = sudden(), np.arange(30), np.full(30, 400)
    plain = find_cliff(correct, total, step=steps)
    repeated = find_cliff(
        np.r_[correct[[4, 4]], correct], np.r_[total[[4, 4]], total], step=np.r_[4, 4, steps]
    )
    assert (repeated.score, repeated.index) == (plain.score, plain.index + 2)
    halves = find_cliff(
        np.r_[correct // 2, correct - correct // 2 + 50],
        np.r_[total // 2, total // 2 + 50],
        step=np.r_[steps, steps],
    )
    whole = find_cliff(correct + 50, total + 50, step=steps)
    assert halves.score == pytest.approx(whole.score, abs=1e-12)


def test_num_total_broadcasts():
    assert find_cliff(sudden(), 400) == find_cliff(sudden(), np.full(30, 400))
    assert find_cliff(sudden(), 400).step is None


@pytest.mark.parametrize("length", [0, 1, 2, 8])
def test_fewer_than_nine_evaluations_are_undetermined(length):
    cliff = find_cliff(np.full(length, 40), 100)
    assert cliff.verdict == "undetermined"
    assert np.isnan([cliff.score, cliff.depth, cliff.p_value, *cliff.interval]).all()
    assert (cliff.index, cliff.step) == (None, None)


@pytest.mark.parametrize("level", [0, 100])
def test_a_flat_curve_at_either_end_has_no_cliff(level):
    cliff = find_cliff(np.full(20, level), 100)
    assert cliff.verdict == "none"
    assert np.isfinite(cliff.score)
    assert cliff.p_value > 0.05


def test_early_falls_and_recovered_ones_are_no_cliffs():
    time = np.arange(40)
    early = np.where(time < 8, 0.8, 0.5)
    recovered = np.where((time > 18) & (time < 26), 0.4, 0.7)
    for accuracy in (early, recovered):
        assert find_cliff(np.rint(500 * accuracy), 500).verdict == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.6], 100), "evaluation 0 .* counts of problems, not accuracies"),
        (([50, 101], 100), "evaluation 1 .* more right answers than problems"),
        (([50, -1], 100), "evaluation 1 .* negative"),
        (([np.nan, 1], 100), "evaluation 0 .* not a finite number"),
        (([0, 0], 0), "evaluation 0 .* no problems"),
        (([[1, 2]], 100), r"shape \(1, 2\)"),
        (([1, 2], [3, 3, 3]), r"num_total has shape \(3,\)"),
        ((["a", "b"], 3), "num_correct must be an array of real numbers"),
    ],
)
def test_impossible_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        find_cliff(*arguments)
    assert isinstance(caught.value, GradscopeError)


@pytest.mark.parametrize(("step", "message"), [([1, 2, 3], "one step a row"), ([1, np.nan], r"step\[1\]")])
def test_impossible_steps_are_refused(step, message):
    with pytest.raises(ValueError, match=message):
        find_cliff([1, 2], 10, step=step)


def slow_score(correct, total, *, margin):
    """The definition, written out for one series."""
    length = len(correct)
    angles = np.arcsin(np.sqrt((correct + 3 / 8) / (total + 3 / 4)))
    differences = np.diff(angles) / np.sqrt(1 / (4 * total[1:] + 2) + 1 / (4 * total[:-1] + 2))
    scatter = (1.4826 * np.median(abs(differences - np.median(differences)))) ** 2
    phi = max(0.3, (8 + (length - 1) * scatter) / (8 + length - 1))

    def z(early, late):
        counts = [(correct[rows].sum() + 0.5, total[rows].sum() + 1) for rows in (early, late)]
        (right_a, all_a), (right_b, all_b) = counts
        p = (right_a + right_b) / (all_a + all_b)
        error = np.sqrt(phi * p * (1 - p) * (1 / all_a + 1 / all_b))
        return (right_a / all_a - right_b / all_b - margin) / error

    scores = {}
    for width in (3, 5, 8, 12, 20):
        for c in range(length):
            if 3 * width <= length and c >= width:
                early = slice(c - width, c)
                end = slice(max(c, length - width), length)
                scores[c, width] = min(z(early, slice(c, c + width)), z(early, end))
    late = 0.4 * length
    return max(
        score
        for (c, width), score in scores.items()
        if c >= late and all(score >= scores.get((b, width), -9) for b in range(c - width, c) if b < late)
    )


def test_many_series_at_once_equal_the_definition_one_by_one():
    generator = np.random.default_rng(0)
    for length in (9, 20, 61):
        total = generator.integers(20, 500, length).astype(float)
        correct = generator.binomial(total.astype(int), 0.6, size=(5, length)).astype(float)
        together = strongest_fall(correct, total, margin=0.03).score
        alone = [slow_score(row, total, margin=0.03) for row in correct]
        np.testing.assert_allclose(together, alone, rtol=1e-11)


def test_the_p_value_is_uniform_on_plateaus():
    generator = np.random.default_rng(0)
    values = np.array(
        [fall_p_value(row, np.full(25, 200.0), num_replicates=199)
         for row in generator.binomial(200, 0.6, size=(400, 25)).astype(float)]
    )  # fmt: skip
    rates = {level: float((values <= level).mean()) for level in (0.05, 0.1, 0.5)}
    print("share of plateaus with p at most", rates)
    for level, rate in rates.items():
        assert abs(rate - level) < 4 * np.sqrt(level * (1 - level) / 400)


def rates(num_runs, *, seed):
    """Share of runs with a verdict of cliff or strong, by kind of curve, and onset errors."""
    generator = np.random.default_rng(seed)
    found = {kind: [] for kind in (*synthetic.FALLING, *synthetic.STEADY)}
    errors = []
    for _ in range(num_runs):
        for kind, hits in found.items():
            length = int(generator.choice([20, 30, 50, 100]))
            num_total = int(generator.choice([30, 100, 300, 1400]))
            jitter = float(generator.choice([0.0, 0.005, 0.01]))
            curve = synthetic.accuracy_curve(
                kind, length=length, num_total=num_total, generator=generator, jitter=jitter
            )
            total = np.full(length, float(num_total))
            fall = strongest_fall(curve.num_correct.astype(float), total, margin=0.03)
            hits.append(float(fall.score) > 2)
            if hits[-1] and curve.onset is not None and kind != "ramp":
                errors.append(abs(int(fall.index) - curve.onset))
    return {kind: float(np.mean(hits)) for kind, hits in found.items()}, np.array(errors)


def check_rates(num_runs, seed):
    found, errors = rates(num_runs, seed=seed)
    true_rate = np.mean([found[kind] for kind in synthetic.FALLING])
    false_rate = np.mean([found[kind] for kind in synthetic.STEADY])
    print({kind: round(rate, 3) for kind, rate in found.items()})
    print(f"found {true_rate:.3f}, false {false_rate:.3f}, onset within one {np.mean(errors <= 1):.3f}")
    slack = 3 * np.sqrt(0.25 / (num_runs * 5))
    assert true_rate > 0.87 - slack
    assert false_rate < 0.03 + 3 * np.sqrt(0.03 * 0.97 / (num_runs * 6))
    assert np.mean(errors <= 1) > 0.93 - slack


def test_rates_of_finding_and_of_false_alarm():
    check_rates(60, seed=1)


@pytest.mark.slow
def test_rates_of_finding_and_of_false_alarm_on_many_runs():
    check_rates(1000, seed=2)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_counts_that_are_not_finite_are_refused_without_a_warning(bad):
    counts = np.full(20, 5.0)
    counts[3] = bad
    for arguments in ((counts, np.full(20, 9.0)), (np.full(20, 5.0), counts)):
        with pytest.raises(ValueError, match=r"evaluation 3 \(.*\) is not a finite number"):
            find_cliff(*arguments)


def test_complex_counts_are_refused():
    with pytest.raises(ValueError, match="num_correct must be an array of real numbers"):
        find_cliff(np.full(20, 5.0 + 1j), 9)


def test_what_was_not_found_is_said_with_its_level():
    run, _ = synthetic.make_run("healthy", seed=0, num_steps=40, num_evaluations=20)
    (finding,) = detector.detect(run)
    assert f"the most cliff-like break, step {finding.evidence['break_step']}, scores" in finding.sentence
