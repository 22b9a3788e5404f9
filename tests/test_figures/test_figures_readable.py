"""Every panel can be read: numbers on axes, bands within the possible, lonely steps, no empty strips."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection

from gradscope.figures import FIGURES
from gradscope.figures.base import NothingToDrawError


def shown(figure):
    """Draws a figure and returns its visible panels, by column position."""
    FigureCanvasAgg(figure).draw()
    return [axes for axes in figure.axes if axes.axison]


def numbers(axis):
    return [label.get_text() for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]


@pytest.fixture(scope="module")
def uneven(build):
    """One setting under two layouts, another under one: the grid of cells has a hole."""
    return [
        build("IP", 0, num_steps=30)[0],
        build("SP", 0, num_steps=30)[0],
        build("SP", 1, num_steps=30, task__name="arithmetic")[0],
    ]


@pytest.mark.parametrize("name", ["gradient_norms", "accuracy", "shares", "amplification"])
def test_the_lowest_panel_of_each_column_bears_the_steps(name, uneven):
    panels = shown(FIGURES.get(name)(uneven).figure)
    columns = {round(axes.get_position().x0, 3) for axes in panels}
    for column in columns:
        members = [axes for axes in panels if round(axes.get_position().x0, 3) == column]
        *above, lowest = sorted(members, key=lambda axes: -axes.get_position().y0)
        assert numbers(lowest.xaxis)
        assert lowest.get_xlabel() == "Training step"
        assert all(axes.get_xlim() == lowest.get_xlim() for axes in above)
        assert all(axes.get_xlabel() == "" for axes in above)


@pytest.mark.parametrize("name", ["gradient_norms", "shares", "alignment"])
def test_a_long_title_is_cut_short_and_stays_in_the_figure(name, build):
    run = build("SP", 0, num_steps=30, model__path="a model of a very long name " * 20)[0]
    figure = FIGURES.get(name)([run]).figure
    FigureCanvasAgg(figure).draw()
    titles = [axes.title for axes in figure.axes if axes.title.get_text()] + [
        title for axes in figure.axes if (title := axes._left_title).get_text()
    ]
    assert any(title.get_text().split("\n")[2].endswith("…") for title in titles)
    for title in titles:
        box = title.get_window_extent()
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1 + 1


@pytest.mark.parametrize("name", ["gradient_norms", "accuracy", "shares"])
def test_the_first_panel_of_each_row_bears_the_values(name, uneven):
    panels = shown(FIGURES.get(name)(uneven).figure)
    for row in {round(axes.get_position().y0, 3) for axes in panels}:
        members = [axes for axes in panels if round(axes.get_position().y0, 3) == row]
        first, *others = sorted(members, key=lambda axes: axes.get_position().x0)
        assert numbers(first.yaxis)
        assert first.get_ylabel()
        assert all(axes.get_ylim() == first.get_ylim() for axes in others)


@pytest.mark.parametrize(
    ("last", "expected"), [(30, [0, 10, 20, 30]), (100, [0, 20, 40, 60, 80, 100]), (23, [0, 5, 10, 15, 20])]
)
def test_steps_on_the_axis_are_round(last, expected, build):
    run, _, _ = build("SP", 0, num_steps=last + 1, evaluate_every=last // 3, gradients=False)
    (axes,) = shown(FIGURES.get("accuracy")([run]).figure)
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == expected


def test_cells_that_were_evaluated_on_other_problems_stand_side_by_side(build):
    sampled, both = ((0.7, False),), ((0.7, False), (float("nan"), True))
    runs = [
        build("IP", 0, num_steps=6, settings=both)[0],
        build("SP", 0, num_steps=6, settings=sampled)[0],
        build("SP", 0, num_steps=6, settings=sampled, task__name="arithmetic")[0],
    ]
    drawing = FIGURES.get("accuracy")(runs)
    assert len(shown(drawing.figure)) == 3
    greedy = drawing.table[drawing.table["evaluated"].str.contains("greedy")]
    assert set(greedy["cell"]) == {"Voting-IP-0.6B-Stack-Code"}


def drawn_bands(axes):
    return [
        path.vertices[:, 1]
        for band in axes.collections
        if isinstance(band, PolyCollection)
        for path in band.get_paths()
    ]


def test_bands_stay_within_what_is_possible(build):
    # Of five seeds: one lies far from the others, so that the interval of the mean leaves the possible.
    runs = [build("SP", seed, num_steps=6, lean=5e3 if seed == 4 else 2e-3)[0] for seed in range(5)]
    limits = {
        "energy_share": (0, 1),
        "norm_share": (0, 1),
        "coherence": (-1, 1),
        "gradient_amplification": (0, 3),
    }
    reached = set()
    for name in ("shares", "amplification"):
        drawing = FIGURES.get(name)(runs)
        lines = drawing.table[drawing.table["drawn_as"] == "line"]
        for quantity, own in lines.groupby("quantity"):
            low, high = limits[quantity]
            assert own["low"].min() >= low
            assert own["high"].max() <= high
            if own["low"].min() == low or own["high"].max() == high:
                reached.add(quantity)
            assert (own["high"] >= own["low"]).all()
    assert {"energy_share", "norm_share"} <= reached
    for axes in FIGURES.get("shares")(runs).figure.axes:
        assert all(band.min() >= 0 and band.max() <= 1 for band in drawn_bands(axes))


def test_intervals_of_cosines_stay_within_one(build):
    run, _, _ = build("SP", 0, num_steps=40, pull=50.0)
    table = FIGURES.get("alignment")([run]).table
    assert table["high"].max() == 1
    assert table["low"].min() >= -1
    assert (table["value"] <= 1).all()


def test_the_legend_names_only_what_is_drawn(build):
    with_counts, _, _ = build("SP", 0, num_steps=6)
    without, _, _ = build("SP", 0, num_steps=6, counts=False)
    for run, expected in ((with_counts, True), (without, False)):
        figure = FIGURES.get("shares")([run]).figure
        texts = [text.get_text() for text in figure.legends[0].texts]
        assert ("expected from counts alone" in texts) == expected


def test_a_step_without_neighbours_has_a_marker(build):
    run, _, _ = build("SP", 0, num_steps=12, dead=[2, 3, 5, 6, 8, 9, 10])
    for name in ("gradient_norms", "shares"):
        (axes, *_) = FIGURES.get(name)([run]).figure.axes
        line = next(line for line in axes.get_lines() if line.get_label() == "generator")
        assert {4, 7, 11} <= set(np.asarray(line.get_xdata())[line.get_markevery()].tolist())
        assert line.get_marker() == "o"


def test_alignment_has_no_empty_strip(six, drawings, build):
    crowded = [
        build("SP", seed, num_steps=12, optim__learning_rate=rate)[0]
        for seed, rate in ((0, 1), (1, 2), (2, 3))
    ]
    draw = FIGURES.get("alignment")
    for figure in (draw(six[:1]).figure, drawings["alignment"].figure, draw(crowded).figure):
        panels = shown(figure)
        boxes = [axes.get_tightbbox() for axes in panels]
        above = figure.bbox.y1 - max(box.y1 for box in boxes)
        below = min(box.y0 for box in boxes) - figure.legends[0].get_window_extent().y1
        assert 0 <= above < 0.2 * figure.dpi
        assert 0 <= below < 0.3 * figure.dpi


def overflowed(run, updates, slot):
    copy = run.copy(deep=True)
    gram = copy["updates"].to_dataset()["gram"].copy()
    gram.loc[{"update": updates, "slot": slot, "slot_b": slot}] = np.inf
    copy["updates"]["gram"] = gram
    return copy


@pytest.mark.parametrize("name", ["gradient_norms", "shares", "amplification", "alignment"])
def test_an_infinite_product_counts_as_missing(name, build):
    run, _, _ = build("SP", 0, num_steps=12)
    drawing = FIGURES.get(name)([overflowed(run, [4], "generator/1")])
    values = drawing.table[["value", "low", "high"]].to_numpy(dtype=float)
    assert not np.isinf(values).any()
    if name != "alignment":
        dots = drawing.table[(drawing.table["drawn_as"] == "dots") & (drawing.table["step"] == 4)]
        assert len(dots)
        assert dots["value"].isna().all()


def test_a_run_of_nothing_but_infinities_holds_no_gradients(build):
    run, _, _ = build("SP", 0, num_steps=3)
    copy = run.copy(deep=True)
    copy["updates"]["gram"] = copy["updates"].to_dataset()["gram"] * np.inf
    with pytest.raises(NothingToDrawError, match="no run holds gradients"):
        FIGURES.get("gradient_norms")([copy])
