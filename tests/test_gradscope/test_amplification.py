"""find_amplification: planted amplification with its onset, look-alikes, and what must not matter."""

import numpy as np
import pytest

from gradscope import derive, find_amplification, synthetic

ROLES = {"generator": 3, "aggregator": 1}


def aligned(cosine, size, num=3):
    return size**2 * (np.eye(num) + cosine * (1 - np.eye(num)))


def obvious(num_steps=100, onset=60):
    quiet, loud = aligned(0.1, 1.0), aligned(0.6, 2.0)
    return np.array([quiet if step < onset else loud for step in range(num_steps)])


def test_an_obvious_amplification_with_its_parts():
    result = find_amplification(obvious(), step=5 * np.arange(100))
    assert (result.verdict, result.index, result.step) == ("amplification", 60, 300)
    assert result.parts["coherence"] == pytest.approx(0.5 / 0.2, rel=1e-12)
    assert result.parts["size"] == pytest.approx(np.log(2) / 0.3, rel=1e-12)
    assert result.score == pytest.approx(np.log(2) / 0.3, rel=1e-12)
    assert result.parts["growth"] == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("late", [aligned(0.6, 1.0), aligned(0.1, 3.0), aligned(0.05, 0.3)])
def test_coherence_alone_and_size_alone_are_none(late):
    grams = obvious()
    grams[60:] = late
    assert find_amplification(grams).verdict == "none"


def test_a_moderate_rise_is_possible():
    grams = obvious()
    grams[60:] = aligned(0.22, 1.5)
    assert find_amplification(grams).verdict == "possible"


def test_scale_and_order_of_slots_do_not_matter():
    series = synthetic.gradient_series(
        "amplification", roles={"worker": 4}, num_steps=150, generator=np.random.default_rng(2)
    )
    plain = find_amplification(series.gram)
    order = [3, 1, 0, 2]
    for other in (1e-10 * series.gram, 1e10 * series.gram, series.gram[:, order][:, :, order]):
        same = find_amplification(other)
        assert same.score == pytest.approx(plain.score, rel=1e-9)
        assert (same.verdict, same.index) == (plain.verdict, plain.index)


def test_a_copy_that_sits_out_does_not_look_like_a_smaller_gradient():
    grams = obvious()
    part = grams.copy()
    part[:60, 2], part[:60, :, 2] = np.nan, np.nan
    assert find_amplification(part).score == pytest.approx(find_amplification(grams).score, rel=1e-12)


def test_dead_steps_are_passed_over():
    grams = obvious()
    grams[::4] = np.nan
    grams[1::9] = 0.0
    result = find_amplification(grams)
    assert result.verdict == "amplification"
    assert abs(result.index - 60) <= 2


@pytest.mark.parametrize("grams", [np.zeros((0, 3, 3)), obvious(19, 10), np.full((100, 3, 3), np.nan)])
def test_too_little_is_undetermined(grams):
    result = find_amplification(grams)
    assert result.verdict == "undetermined"
    assert np.isnan(result.score)
    assert (result.index, result.step) == (None, None)


def test_four_steps_in_a_window_are_too_few():
    grams = obvious()
    grams[84:] = np.nan
    assert find_amplification(grams).verdict == "undetermined"


@pytest.mark.parametrize(
    "grams",
    [np.ones((50, 1, 1)), np.ones((50, 2)), np.ones((50, 2, 3)), -obvious(), np.inf * np.ones((50, 2, 2))],
)
def test_impossible_grams_are_refused(grams):
    with pytest.raises(ValueError, match="slot_gram"):
        find_amplification(grams)


def check_rates(num_runs, seed):
    generator = np.random.default_rng(seed)
    kinds = ("amplification", *synthetic.HARMLESS, "capture")
    verdicts = {kind: [] for kind in kinds}
    errors = []
    for _ in range(num_runs):
        for kind, seen in verdicts.items():
            num_steps = int(generator.choice([60, 100, 200, 400]))
            series = synthetic.gradient_series(kind, roles=ROLES, num_steps=num_steps, generator=generator)
            result = find_amplification(series.gram[:, :3, :3])
            seen.append(result.verdict)
            if kind == "amplification" and result.verdict == kind:
                errors.append(abs(result.index - series.onset) / num_steps)
    true_rate = np.mean([verdict == "amplification" for verdict in verdicts["amplification"]])
    some_rate = np.mean([verdict != "none" for verdict in verdicts["amplification"]])
    harmless = [verdict for kind in kinds[1:] for verdict in verdicts[kind]]
    false_rate = np.mean([verdict == "amplification" for verdict in harmless])
    maybe_rate = np.mean([verdict != "none" for verdict in harmless])
    print(f"found {true_rate:.3f} (at least possible {some_rate:.3f}), false {false_rate:.4f} "
          f"({maybe_rate:.3f}), onset error {np.median(errors):.3f} of the run")  # fmt: skip
    slack = 3 * np.sqrt(0.25 / num_runs)
    assert true_rate > 0.72 - slack
    assert some_rate > 0.95 - 3 * np.sqrt(0.05 / num_runs)
    assert false_rate < 0.004 + 3 * np.sqrt(0.004 / len(harmless))
    assert maybe_rate < 0.07 + 3 * np.sqrt(0.07 / len(harmless))
    assert np.median(errors) < 0.04


def test_rates_of_finding_and_of_false_alarm():
    check_rates(50, seed=1)


@pytest.mark.slow
def test_rates_of_finding_and_of_false_alarm_on_many_runs():
    check_rates(500, seed=2)


def test_the_coherence_is_the_projects_own():
    kappa = derive.coherence(obvious())
    assert kappa[0] == pytest.approx(0.1)
    assert find_amplification(obvious()).parts["coherence_base"] == pytest.approx(kappa[0], rel=1e-12)
