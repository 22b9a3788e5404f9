"""Windows, onsets and dispersion on series where the answer is known."""

import math

import numpy as np
import pytest

from gradscope.runfile import RunWriter, open_run
from gradscope.stats.evaluations import dispersion, evaluation_series, order_evaluations
from gradscope.stats.grams import logit
from gradscope.stats.windows import onset, windows_for


@pytest.mark.parametrize(("num_steps", "width"), [(20, 10), (50, 10), (51, 11), (200, 40)])
def test_windows_are_a_fifth_and_at_least_ten_steps(num_steps, width):
    windows = windows_for(num_steps)
    assert (windows.base, windows.final) == (slice(0, width), slice(num_steps - width, num_steps))


def test_windows_never_overlap():
    assert windows_for(19) is None
    assert windows_for(0) is None


def test_window_centres_ignore_missing_values():
    series = np.arange(40.0)
    series[:5] = np.nan
    base, final = windows_for(40).medians(series)
    assert (base, final) == (7.0, 34.5)
    series[5] = np.nan
    assert np.isnan(windows_for(40).medians(series)[0])


def test_the_onset_of_a_step_is_its_first_row():
    for place in (30, 50, 77):
        series = np.where(np.arange(100) < place, 1.0, 3.0)
        assert onset(series, base=1.0, final=3.0) == place
        assert onset(-series, base=-1.0, final=-3.0) == place


def test_the_onset_of_a_ramp_is_near_its_foot():
    generator = np.random.default_rng(0)
    errors = []
    for _ in range(50):
        foot, length = int(generator.integers(40, 90)), int(generator.integers(20, 60))
        series = np.clip((np.arange(200) - foot) / length, 0, 1) + 0.1 * generator.standard_normal(200)
        errors.append((onset(series, base=0.0, final=1.0) - foot) / length)
    assert 0.0 < np.median(errors) < 0.3
    assert max(errors) < 0.5


def test_the_onset_counts_rows_of_the_series_with_its_gaps():
    series = np.where(np.arange(100) < 60, 0.0, 1.0)
    series[[10, 20, 30, 60]] = np.nan
    assert onset(series, base=0.0, final=1.0) == 61
    assert onset(np.full(10, np.nan), base=0.0, final=1.0) is None


def test_dispersion_tells_binomial_from_jitter_and_from_shared_items():
    generator = np.random.default_rng(0)
    total = np.full(200, 1000.0)
    binomial = generator.binomial(1000, 0.6, (50, 200)).astype(float)
    jitter = generator.binomial(1000, np.clip(0.6 + 0.03 * generator.standard_normal((50, 200)), 0, 1))
    assert np.median(dispersion(binomial, total)) == pytest.approx(1.0, abs=0.1)
    assert np.median(dispersion(jitter.astype(float), total)) == pytest.approx(
        1 + 0.03**2 * 1000 / 0.24, rel=0.15
    )
    assert dispersion(np.full(200, 600.0), total) == 0.3


def test_dispersion_ignores_a_trend_and_a_break():
    total = np.full(100, 1000.0)
    trend = np.rint(np.linspace(300, 700, 100))
    trend[50:] -= 200
    assert dispersion(trend, total) < 0.4


def test_evaluations_are_ordered_and_merged():
    series = order_evaluations([3, 1, 1, 2, 5], [10, 10, 10, 10, 20], [20, 10, 10, 10, 30])
    assert series.step.tolist() == [10, 20, 30]
    assert series.correct.tolist() == [3, 3, 5]
    assert series.total.tolist() == [20, 10, 20]
    assert series.source.tolist() == [1, 0, 4]


def test_logit_stays_finite_at_the_ends():
    assert logit(np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx(
        [-np.log(1e6 - 1), 0.0, np.log(1e6 - 1)]
    )
    assert np.isnan(logit(np.array([np.nan]))[0])


def evaluated(path):
    slots = {"a/0": "a"}
    with RunWriter(path, slots=slots, policies={"a": "p"}) as writer:
        rows = [
            (0, 1, "x", 0.7), (5, 2, "x", 0.7), (5, 4, "x", 0.7), (5, 3, "y", 0.7), (5, 9, "x", 1.0),
            (9, math.nan, "x", 0.7),
        ]  # fmt: skip
        for step, correct, dataset, temperature in rows:
            writer.append_evaluation(
                step, num_correct=correct, num_total=10, dataset=dataset, temperature=temperature
            )
        writer.append_evaluation(5, num_correct=7, num_total=10, dataset="x", temperature=0.0, greedy=True)
        writer.append_evaluation(5, num_correct=7, num_total=10, dataset="x")
    return open_run(path)


def test_only_evaluations_of_one_data_set_and_one_way_of_sampling_are_one_series(tmp_path):
    found = evaluation_series(evaluated(tmp_path))
    settings = {str(setting): series for setting, series in found.items()}
    assert list(settings) == [
        "x, sampled at T = 0.7", "y, sampled at T = 0.7", "x, sampled at T = 1", "x, greedy", "x, sampled",
    ]  # fmt: skip
    series = settings["x, sampled at T = 0.7"]
    assert series.step.tolist() == [0, 5]
    assert (series.correct.tolist(), series.total.tolist()) == ([1, 6], [10, 20])
    assert settings["x, greedy"].correct.tolist() == [7]


def test_a_run_without_evaluations_has_no_series(tmp_path):
    with RunWriter(tmp_path, slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        writer.append(0)
    assert evaluation_series(open_run(tmp_path)) == {}
