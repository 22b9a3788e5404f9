"""Means, intervals and smoothing against slow computations and known values."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from gradscope.figures.bands import band_words, over_runs, smooth, window_for


def series(values, first=0):
    return xr.DataArray(np.asarray(values, float), {"step": np.arange(first, first + len(values))}, ("step",))


def test_running_mean_is_the_mean_of_the_values_there():
    values = np.random.default_rng(0).standard_normal(30)
    values[[3, 4, 12]] = np.nan
    smoothed = smooth(series(values), 9)
    for step in range(30):
        window = values[max(0, step - 4) : step + 5]
        known = window[np.isfinite(window)]
        assert 2 * known.size >= window.size
        assert smoothed.values[step] == pytest.approx(known.mean(), abs=1e-12)


def test_a_stretch_without_values_stays_empty():
    values = np.ones(40)
    values[10:25] = np.nan
    smoothed = smooth(series(values), 9).values
    assert np.isnan(smoothed[10:25]).all()
    assert np.isfinite(smoothed[:10]).all()
    assert np.isfinite(smoothed[25:]).all()


def test_a_window_of_one_changes_nothing():
    values = series([1.0, np.nan, 3.0])
    xr.testing.assert_equal(smooth(values, 1), values)


def test_short_runs_are_not_smoothed():
    assert (window_for(35), window_for(36)) == (1, 9)


def test_band_over_seeds_is_student_t():
    runs = np.array([[0.1, 0.5, 0.2], [0.4, 0.6, 0.1], [0.2, 0.9, 0.3], [0.3, 0.4, 0.9], [0.2, 0.2, 0.2]])
    band = over_runs([series(row) for row in runs])
    low, high = stats.t.interval(0.95, 4, runs.mean(axis=0), stats.sem(runs, axis=0))
    np.testing.assert_allclose(band["mean"], runs.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(band["low"], low, rtol=1e-12)
    np.testing.assert_allclose(band["high"], high, rtol=1e-12)
    assert band["num_runs"].values.tolist() == [5, 5, 5]


def test_band_of_few_seeds_is_their_range():
    band = over_runs([series([0.1, 0.5]), series([0.4, 0.6]), series([0.3, 0.1])])
    assert band["low"].values.tolist() == [0.1, 0.1]
    assert band["high"].values.tolist() == [0.4, 0.6]
    assert band_words([3, 1]) == "the seeds' range"
    assert band_words([7]) == "the 95 % interval of the mean"
    assert band_words([3, 7]) == "the seeds' range, or the 95 % interval of the mean from 5 seeds"


def test_a_lone_run_does_not_pass_for_the_mean():
    band = over_runs([series([1.0, 2.0, 3.0]), series([3.0, np.nan], first=0)])
    assert band["mean"].values[0] == 2.0
    assert np.isnan(band["mean"].values[1:]).all()
    assert band["num_runs"].values.tolist() == [2, 1, 1]


def test_two_of_three_runs_have_a_mean_but_no_interval():
    band = over_runs([series([1.0, 2.0]), series([3.0, np.nan]), series([5.0, 6.0])])
    assert band["mean"].values.tolist() == [3.0, 4.0]
    assert np.isfinite(band["low"].values).tolist() == [True, False]


def test_fewer_than_half_of_the_runs_have_no_mean():
    lengths = (3, 3, 2, 1, 1)
    band = over_runs([series(np.arange(length) + run) for run, length in enumerate(lengths)])
    assert band["num_runs"].values.tolist() == [5, 3, 2]
    assert np.isfinite(band["mean"].values).tolist() == [True, True, False]
    assert np.isfinite(band["low"].values).tolist() == [True, True, False]


def test_one_run_is_itself_without_interval():
    band = over_runs([series([1.0, np.nan, 3.0])])
    np.testing.assert_array_equal(band["mean"], [1.0, np.nan, 3.0])
    assert np.isnan(band["low"]).all()
    assert np.isnan(band["high"]).all()
