"""Warner: speaks on a joint change only, without look-ahead, and survives steps without values."""

import math

import numpy as np
import pytest

from gradscope import Warner
from gradscope.errors import ConfigError, SchemaError
from gradscope.warner import WarnerSettings, replay


def noise(seed, length=400):
    return np.random.default_rng(seed).standard_normal((length, 2)) * [0.2, 0.1] + [-1.0, 0.2]


def changed(seed, *, size=0.6, kappa=0.3, onset=250):
    series = noise(seed)
    series[onset:] += [size, kappa]
    return series


def test_a_joint_rise_warns_soon_after_it_begins():
    for seed in range(10):
        alarms = replay(*changed(seed).T)
        first = int(np.argmax(alarms))
        assert alarms.any()
        assert 250 <= first <= 270


def test_independent_noise_never_warns():
    assert not any(replay(*noise(seed, 600).T).any() for seed in range(40))


@pytest.mark.parametrize(("size", "kappa"), [(1.0, 0.0), (0.0, 0.6), (-1.0, -0.6), (1.0, -0.6)])
def test_one_alone_or_a_fall_does_not_warn(size, kappa):
    assert not any(replay(*changed(seed, size=size, kappa=kappa).T).any() for seed in range(20))


def test_single_spikes_do_not_warn():
    series = noise(1)
    series[[150, 200, 260, 330]] = [50.0, 0.99]
    assert not replay(*series.T).any()


def test_there_is_no_look_ahead():
    series = changed(3)
    whole = replay(*series.T)
    for end in (100, 200, 255, 300):
        np.testing.assert_array_equal(replay(*series[:end].T), whole[:end])


def test_it_equals_the_definition_written_out():
    series = changed(4)
    averages = np.zeros(2)
    expected = []
    for t, value in enumerate(series):
        reference = series[max(0, t - 170) : max(0, t - 20)]
        if len(reference) >= 80:
            centre = np.median(reference, axis=0)
            scale = 1.4826 * np.median(abs(reference - centre), axis=0)
            averages = 0.9 * averages + 0.1 * np.clip((value - centre) / scale, -4, 4)
        expected.append(averages.min() > 0.9)
    np.testing.assert_array_equal(replay(*series.T), expected)


def test_steps_without_values_are_passed_over():
    series = changed(5)
    holes = np.full((800, 2), np.nan)
    holes[::2] = series
    holes[1::4, 0] = np.inf
    np.testing.assert_array_equal(replay(*holes.T)[::2], replay(*series.T))
    assert not replay(*holes.T)[1::2].any()
    warner = Warner()
    for value in (math.nan, math.inf, -math.inf):
        assert warner.update(value, 0.1) is False
        assert warner.update(0.1, value) is False
    assert warner.num_observations == 0


def test_it_stays_silent_until_there_is_a_reference():
    warner = Warner()
    for step in range(99):
        assert warner.update(float(step), float(step)) is False
    assert warner.num_observations == 99
    assert math.isnan(warner.z_log_norm)
    assert math.isnan(warner.z_coherence)
    warner.update(99.0, 99.0)
    warner.update(100.0, 100.0)
    assert warner.z_log_norm > 0


def test_a_constant_reference_does_not_divide_by_zero():
    warner = Warner()
    for _ in range(200):
        assert warner.update(-1.0, 0.5) is False
    assert (warner.z_log_norm, warner.z_coherence) == (0.0, 0.0)


def test_scale_and_offset_do_not_matter():
    series = changed(6)
    np.testing.assert_array_equal(replay(*series.T), replay(*(3.0 * series + 7.0).T))


def test_impossible_settings_and_series_are_refused():
    with pytest.raises(ConfigError, match="threshold 5"):
        WarnerSettings(threshold=5.0)
    with pytest.raises(ConfigError, match="fewest 200"):
        WarnerSettings(fewest=200)
    with pytest.raises(ValueError, match=r"expected \[T\]"):
        replay([1.0, 2.0], [1.0])


@pytest.mark.parametrize("value", ["a", "1", None, [1.0, 2.0], 1j])
def test_what_is_no_number_is_refused(value):
    for arguments, name in (((value, 1.0), "log_norm"), ((1.0, value), "coherence")):
        with pytest.raises(SchemaError, match=f"Warner.update: {name}"):
            Warner().update(*arguments)


def test_settings_must_be_settings():
    with pytest.raises(ConfigError, match="Warner takes WarnerSettings, not str 'x'"):
        Warner("x")
