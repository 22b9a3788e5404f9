"""The plotted norms, shares, amplifications and cosines equal slow computations on the gradient vectors."""

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from gradscope.figures import FIGURES
from gradscope.figures.base import NothingToDrawError
from gradscope.figures.style import ROLE_LOOKS

ROLES = ("generator", "aggregator")
DEAD = range(20, 30)


def rows(table, **wanted):
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table


def line_of(axes, label):
    return next(line for line in axes.get_lines() if line.get_label() == label)


def test_norm_dots_are_the_norms_of_the_roles_vectors(drawings, shared, isolated):
    table = drawings["gradient_norms"].table
    for layout, runs in (("SP", shared), ("IP", isolated)):
        for seed, (_, recipe, _) in enumerate(runs):
            for role in ROLES:
                dots = rows(
                    table, cell=f"Voting-{layout}-0.6B-Stack-Code", role=role, drawn_as="dots", seed=str(seed)
                )
                expected = np.sqrt(recipe.energy(role))
                expected[expected == 0] = np.nan
                np.testing.assert_allclose(dots["value"], expected, rtol=1e-12)


def test_norm_line_is_the_geometric_mean_over_nine_steps_and_seeds(drawings, isolated):
    line = rows(
        drawings["gradient_norms"].table, cell="Voting-IP-0.6B-Stack-Code", role="generator", drawn_as="line"
    )
    logs = np.array([0.5 * np.log(recipe.energy("generator")) for _, recipe, _ in isolated])
    smoothed = np.array([logs[:, max(0, t - 4) : t + 5].mean(axis=1) for t in range(40)])
    np.testing.assert_allclose(line["value"], np.exp(smoothed.mean(axis=1)), rtol=1e-12)
    np.testing.assert_allclose(line["high"], np.exp(smoothed.max(axis=1)), rtol=1e-12)
    assert (line["num_runs"] == 3).all()


def test_norms_stand_on_one_log_axis_isolated_beside_shared_in_the_roles_colours(drawings):
    left, right = drawings["gradient_norms"].figure.axes
    assert left.get_yscale() == right.get_yscale() == "log"
    assert left.get_ylim() == right.get_ylim()
    assert left.get_title("left") == "Voting-IP-0.6B-Stack-Code, 3 seeds"
    assert right.get_title("left") == "Voting-SP-0.6B-Stack-Code, 3 seeds"
    for axes in (left, right):
        for role in ROLES:
            assert line_of(axes, role).get_color() == ROLE_LOOKS[role].colour
    np.testing.assert_array_equal(
        line_of(left, "generator").get_ydata(),
        rows(
            drawings["gradient_norms"].table,
            cell="Voting-IP-0.6B-Stack-Code",
            role="generator",
            drawn_as="line",
        )["value"],
    )


def test_shares_equal_brute_force_and_are_blank_without_signal(drawings, shared):
    table = drawings["shares"].table
    assert set(table["cell"]) == {"Voting-SP-0.6B-Stack-Code"}
    for seed, (_, recipe, _) in enumerate(shared):
        energies = np.array([recipe.energy(role) for role in ROLES])
        alive = np.setdiff1d(np.arange(40), DEAD)
        for place, role in enumerate(ROLES):
            for quantity, values in (("energy_share", energies), ("norm_share", np.sqrt(energies))):
                dots = rows(table, role=role, quantity=quantity, drawn_as="dots", seed=str(seed))[
                    "value"
                ].values
                np.testing.assert_allclose(
                    dots[alive], (values[place] / values.sum(axis=0).clip(1e-300))[alive]
                )
                assert np.isnan(dots[list(DEAD)]).all()


def test_shares_lines_leave_a_gap_where_there_is_no_signal(drawings):
    for axes in drawings["shares"].figure.axes:
        for role in ROLES:
            values = line_of(axes, role).get_ydata()
            assert np.isnan(values[list(DEAD)]).all()
            assert np.isfinite(np.delete(values, list(DEAD))).all()


def test_counts_only_expectation_is_dashed_and_follows_the_rows_with_signal(drawings, build):
    run, recipe, _ = build("SP", 7, num_steps=12)
    drawing = FIGURES.get("shares")([run])
    counts = np.array([recipe.signal[:, :3].sum(axis=1), recipe.signal[:, 3]])
    expected = rows(drawing.table, quantity="energy_share", role="generator", drawn_as="counts only")["value"]
    np.testing.assert_allclose(expected, counts[0] / counts.sum(axis=0), rtol=1e-12)
    expected = rows(drawing.table, quantity="norm_share", role="aggregator", drawn_as="counts only")["value"]
    np.testing.assert_allclose(expected, np.sqrt(counts[1]) / np.sqrt(counts).sum(axis=0), rtol=1e-12)
    dashed = line_of(drawing.figure.axes[0], "_expected_generator")
    assert dashed.get_linestyle() == "--"
    assert dashed.get_color() == ROLE_LOOKS["generator"].colour


def test_a_step_with_several_updates_sums_their_energies(build):
    run, recipe, _ = build("SP", 3, num_steps=10, num_updates=2)
    dots = rows(
        FIGURES.get("shares")([run]).table, quantity="energy_share", role="generator", drawn_as="dots"
    )
    energies = np.array([recipe.energy(role) for role in ROLES])
    np.testing.assert_allclose(dots["value"], energies[0] / energies.sum(axis=0), rtol=1e-12)


def test_coherence_and_amplification_equal_their_formulas(drawings, isolated):
    table = drawings["amplification"].table
    _, recipe, _ = isolated[0]
    copies = recipe.gradients[:, 0, :3]
    norms = np.linalg.norm(copies, axis=2)
    total = np.linalg.norm(copies.sum(axis=1), axis=1)
    expected = {
        "coherence": (total**2 - (norms**2).sum(axis=1)) / (norms.sum(axis=1) ** 2 - (norms**2).sum(axis=1)),
        "gradient_amplification": 3 * total / norms.sum(axis=1),
    }
    for quantity, values in expected.items():
        dots = rows(
            table,
            cell="Voting-IP-0.6B-Stack-Code",
            role="generator",
            quantity=quantity,
            drawn_as="dots",
            seed="0",
        )
        np.testing.assert_allclose(dots["value"], values, rtol=1e-9)


def test_orthogonal_line_follows_the_norms_and_the_aligned_line_is_their_number(build):
    run, recipe, _ = build("IP", 4, num_steps=12)
    drawing = FIGURES.get("amplification")([run])
    norms = np.linalg.norm(recipe.gradients[:, 0, :3], axis=2)
    lines = {name: rows(drawing.table, drawn_as=name)["value"].values for name in ("orthogonal", "aligned")}
    np.testing.assert_allclose(lines["orthogonal"], 3 * np.sqrt((norms**2).sum(axis=1)) / norms.sum(axis=1))
    assert (lines["orthogonal"] >= np.sqrt(3) - 1e-12).all()
    assert (lines["aligned"] == 3).all()
    coherence, amplification = drawing.figure.axes
    np.testing.assert_array_equal(line_of(amplification, "_orthogonal").get_ydata(), lines["orthogonal"])
    assert line_of(coherence, "_orthogonal").get_ydata()[0] == 0
    assert line_of(coherence, "_aligned").get_ydata()[0] == 1
    assert set(drawing.table["role"]) == {"generator"}


def test_a_copy_that_sits_out_is_not_counted(build):
    run, recipe, _ = build("IP", 4, num_steps=12, drop_rows={(5, "generator/2")})
    table = FIGURES.get("amplification")([run]).table
    norms = np.linalg.norm(recipe.gradients[5, 0, :2], axis=1)
    at_5 = table[table["step"] == 5].set_index(["quantity", "drawn_as"])["value"]
    assert at_5["gradient_amplification", "aligned"] == 2
    assert at_5["gradient_amplification", "orthogonal"] == pytest.approx(
        2 * np.sqrt((norms**2).sum()) / norms.sum()
    )


def pooled(recipe, steps, one, other):
    vectors = recipe.gradients[steps, 0]
    top = (vectors[:, one] * vectors[:, other]).sum()
    return top / np.sqrt((vectors[:, one] ** 2).sum() * (vectors[:, other] ** 2).sum())


def test_alignment_pools_products_and_norms_over_the_first_and_last_fifth(drawings, shared):
    table = rows(drawings["alignment"].table, cell="Voting-SP-0.6B-Stack-Code")
    slots = list(shared[0][1].slots)
    for window, steps in (("early", slice(0, 10)), ("late", slice(30, 40))):
        means = rows(table, window=window, drawn_as="mean").set_index(["slot", "slot_b"])["value"]
        for one, name in enumerate(slots):
            for other, name_b in enumerate(slots):
                values = [pooled(recipe, steps, one, other) for _, recipe, _ in shared]
                assert means[name, name_b] == pytest.approx(np.mean(values), abs=1e-12)
                seed = rows(table, window=window, drawn_as="run", seed="1").set_index(["slot", "slot_b"])[
                    "value"
                ]
                assert seed[name, name_b] == pytest.approx(values[1], abs=1e-12)


def test_separate_policies_are_hatched_and_never_zero(drawings):
    drawing = drawings["alignment"]
    table = rows(drawing.table, cell="Voting-IP-0.6B-Stack-Code", drawn_as="mean")
    apart = table["slot"].str.startswith("aggregator") != table["slot_b"].str.startswith("aggregator")
    assert apart.sum() == 2 * 6
    assert table[apart]["value"].isna().all()
    assert table[~apart]["value"].notna().all()
    early = drawing.figure.axes[0]
    hatched = [patch for patch in early.patches if isinstance(patch, Rectangle)]
    assert len(hatched) == 6
    assert {patch.get_hatch() for patch in hatched} == {"/////"}
    assert len(early.texts) == 10
    assert early.images[0].get_array().mask.sum() == 6
    assert (early.images[0].norm.vmin, early.images[0].norm.vmax) == (-1, 1)
    middle = matplotlib.colors.to_rgb(early.images[0].cmap(0.5))
    assert min(middle) > 0.95  # a cosine of 0 is white
    assert [text.get_text() for text in drawing.figure.legends[0].texts] == [
        "not applicable: separate policies share no coordinates"
    ]


def test_too_little_signal_is_hatched_otherwise(build):
    run, _, _ = build("SP", 1, num_steps=40, dead=range(2, 40))
    drawing = FIGURES.get("alignment")([run])
    assert drawing.table["value"].isna().all()
    assert {patch.get_hatch() for axes in drawing.figure.axes[:2] for patch in axes.patches} == {"....."}
    assert drawing.figure.axes[0].texts[:] == []


def test_a_short_run_is_cut_into_halves(build):
    run, recipe, _ = build("SP", 1, num_steps=8)
    early = rows(FIGURES.get("alignment")([run]).table, window="early").set_index(["slot", "slot_b"])["value"]
    assert early["generator/0", "generator/1"] == pytest.approx(pooled(recipe, slice(0, 4), 0, 1), abs=1e-12)


ONE_SLOT = {"generator/0": "generator"}


@pytest.mark.parametrize("name", ["gradient_norms", "shares", "amplification", "alignment"])
def test_without_gradients_nothing_is_drawn(name, build):
    run, _, _ = build("SP", 1, num_steps=3, gradients=False)
    with pytest.raises(NothingToDrawError, match="no run holds gradients"):
        FIGURES.get(name)([run])


@pytest.mark.parametrize(
    ("name", "slots", "reason"),
    [
        ("shares", None, "no policy of these runs is shared by two or more roles"),
        ("amplification", ONE_SLOT, "no role has two or more slots that train one policy"),
        ("alignment", ONE_SLOT, "no policy is trained by two or more slots"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(name, slots, reason, build):
    run, _, _ = build("IP", 1, num_steps=3, **({"slots": slots} if slots else {}))
    with pytest.raises(NothingToDrawError, match=reason):
        FIGURES.get(name)([run])


def test_a_role_on_two_policies_has_one_norm(build):
    run, recipe, _ = build(
        {f"generator/{k}": f"p{k}" for k in range(3)} | {"aggregator": "a"}, 1, num_steps=6
    )
    dots = rows(FIGURES.get("gradient_norms")([run]).table, role="generator", drawn_as="dots")["value"]
    np.testing.assert_allclose(dots, np.sqrt((recipe.gradients[:, 0, :3] ** 2).sum(axis=(1, 2))), rtol=1e-12)


def test_runs_without_gradients_do_not_stop_the_others(build, six):
    bare, _, _ = build("SP", 9, num_steps=3, gradients=False)
    drawing = FIGURES.get("gradient_norms")([*six, bare])
    assert len(drawing.figure.axes) == 2


def test_a_band_that_says_nothing_does_not_set_the_scale(build):
    scales = enumerate((1.0, 1e-6, 1.0, 1e-6, 1.0))
    runs = [build("SP", seed, num_steps=6, scale=scale)[0] for seed, scale in scales]
    drawing = FIGURES.get("gradient_norms")(runs)
    low, high = drawing.figure.axes[0].get_ylim()
    dots = rows(drawing.table, drawn_as="dots")["value"]
    assert low == pytest.approx(dots.min() / 1.3)
    assert high == pytest.approx(dots.max() * 1.3)
    assert rows(drawing.table, drawn_as="line")["high"].max() > 10 * high


def test_a_mean_cosine_needs_two_seeds(build):
    alive = [build("SP", seed, num_steps=40)[0] for seed in (0, 1)]
    dead = build("SP", 2, num_steps=40, dead=range(30, 40))[0]
    for runs, expected in (([*alive, dead], 2), ([alive[0], dead], 1)):
        means = rows(FIGURES.get("alignment")(runs).table, window="late", drawn_as="mean")
        assert (means["num_runs"] == expected).all()
        assert means["value"].notna().all() == (expected == 2)
