"""Plotted accuracies, intervals and marks against the counts that were written."""

import numpy as np
import pytest
from scipy import stats

import gradscope
from gradscope.figures import FIGURES
from gradscope.figures.base import NothingToDrawError
from gradscope.runfile import RunWriter

draw = FIGURES.get("accuracy")


def correct(recipe, *, greedy):
    return np.array([count for _, way, count in recipe.evaluations if way == greedy])


def test_sampled_and_greedy_have_their_own_panels_and_numbers(drawings, isolated):
    figure, table = drawings["accuracy"]
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["Voting-0.6B-Stack-Code\nheld_out, sampled at T = 0.7", "\nheld_out, greedy"]
    for greedy, words in ((False, "held_out, sampled at T = 0.7"), (True, "held_out, greedy")):
        for seed, (_, recipe, _) in enumerate(isolated):
            rows = table[
                (table["cell"] == "Voting-IP-0.6B-Stack-Code") & (table["evaluated"] == words)
                & (table["drawn_as"] == "run") & (table["seed"] == str(seed))
            ]  # fmt: skip
            np.testing.assert_allclose(rows["value"], correct(recipe, greedy=greedy) / 300, rtol=1e-15)
            assert rows["step"].tolist() == list(range(0, 40, 2))


def test_band_over_three_seeds_is_their_range(drawings, shared):
    table = drawings["accuracy"].table
    mean = table[
        (table["cell"] == "Voting-SP-0.6B-Stack-Code") & (table["drawn_as"] == "mean")
        & (table["evaluated"] == "held_out, greedy")
    ]  # fmt: skip
    values = np.array([correct(recipe, greedy=True) / 300 for _, recipe, _ in shared])
    np.testing.assert_allclose(mean["value"], values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(mean["low"], values.min(axis=0), rtol=1e-12)
    np.testing.assert_allclose(mean["high"], values.max(axis=0), rtol=1e-12)
    labels = [text.get_text() for text in drawings["accuracy"].figure.legends[0].texts]
    assert labels == ["IP, 3 seeds", "SP, 3 seeds", "peak of a run with a cliff", "its onset"]


def test_one_run_has_binomial_intervals_and_says_so(shared):
    run, recipe, _ = shared[0]
    figure, table = draw([run])
    rows = table[table["evaluated"] == "held_out, greedy"].reset_index()
    for place, count in enumerate(correct(recipe, greedy=True)):
        expected = stats.binomtest(int(count), 300).proportion_ci(0.95, method="wilson")
        assert rows["low"][place] == pytest.approx(expected.low, abs=1e-12)
        assert rows["high"][place] == pytest.approx(expected.high, abs=1e-12)
    legend = figure.legends[0]
    assert "binomial interval" in legend.get_title().get_text()
    assert [text.get_text() for text in legend.texts] == ["SP, one seed"]
    assert "mean" not in set(table["drawn_as"])


def test_peak_and_onset_are_marked_only_where_the_detector_sees_a_cliff(drawings, isolated, shared):
    table = drawings["accuracy"].table
    marks = table[table["drawn_as"].isin(["peak", "cliff onset"])]
    assert set(marks["cell"]) == {"Voting-IP-0.6B-Stack-Code"}
    assert set(marks["seed"]) == {"0", "1"}
    for seed in (0, 1):
        counts = correct(isolated[seed][1], greedy=False)
        cliff = gradscope.find_cliff(counts, 300, step=np.arange(0, 40, 2))
        assert cliff.verdict == "strong"
        own = marks[(marks["seed"] == str(seed)) & marks["evaluated"].str.contains("sampled")].set_index(
            "drawn_as"
        )
        assert own["step"]["cliff onset"] == cliff.step == 28
        assert own["value"]["cliff onset"] == counts[14] / 300
        assert own["step"]["peak"] == 2 * np.argmax(counts)
        assert own["value"]["peak"] == counts.max() / 300
    sampled = drawings["accuracy"].figure.axes[0]
    drawn = [line.get_label() for line in sampled.get_lines() if "peak" in line.get_label()]
    assert drawn == ["_peak_0", "_peak_1"]


def test_repeats_of_a_step_are_pooled_and_copies_counted_once(tmp_path):
    with RunWriter(tmp_path / "run", slots={"a/0": "a"}, policies={"a": "p"}, hardware="none") as writer:
        writer.append(0)
        for right in (40, 50, 50):
            writer.append_evaluation(0, num_correct=right, num_total=100, dataset="held_out")
    _, table = draw([gradscope.open_run(tmp_path / "run")])
    assert table["value"].tolist() == [0.45]
    assert table["evaluated"].tolist() == ["held_out, sampled"]


def test_without_evaluations_nothing_is_drawn(build):
    run, _, _ = build("SP", 0, num_steps=2, evaluate_every=0)
    with pytest.raises(NothingToDrawError, match="no run holds evaluations"):
        draw([run])


def test_two_test_sets_are_two_panels(tmp_path):
    with RunWriter(tmp_path / "run", slots={"a/0": "a"}, policies={"a": "p"}, hardware="none") as writer:
        writer.append(0)
        for dataset in ("easy", "hard"):
            writer.append_evaluation(0, num_correct=1, num_total=2, dataset=dataset, temperature=1.0)
    figure, _ = draw([gradscope.open_run(tmp_path / "run")])
    assert len(figure.axes) == 2
