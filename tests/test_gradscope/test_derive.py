"""Derived quantities against the gradient vectors themselves, slow and obvious."""

import numpy as np
import pytest

from gradscope import derive
from gradscope.errors import RunFileError, UnknownNameError
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"g/0": "g", "g/1": "g", "g/2": "g", "a/0": "a"}
NAMES = tuple(SLOTS)
ROLE_OF = list(SLOTS.values())
Z = derive.membership(ROLE_OF, ["g", "a"])


@pytest.fixture
def gradients():
    """Slot gradients [T, K, P] with some slots absent; never all copies of a role."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 4, 9)) * 10.0 ** rng.integers(-3, 3, (6, 4, 1))
    values[2, 1] = np.nan
    values[4, 0] = np.nan
    values[4, 1] = np.nan
    return values


def gram_of(vectors):
    return np.einsum("...kp,...lp->...kl", vectors, vectors)


def test_norms_and_cosines(gradients):
    gram = gram_of(gradients)
    for step in range(len(gradients)):
        for k in range(4):
            expected = np.linalg.norm(gradients[step, k])
            np.testing.assert_allclose(derive.norms(gram)[step, k], expected, rtol=1e-14)
            for other in range(4):
                scale = expected * np.linalg.norm(gradients[step, other])
                cosine = gradients[step, k] @ gradients[step, other] / scale
                np.testing.assert_allclose(derive.cosines(gram)[step, k, other], cosine, rtol=1e-12)


def test_role_gram_is_that_of_the_summed_vectors(gradients):
    sums = np.stack([np.nansum(gradients[:, :3], axis=1), gradients[:, 3]], axis=1)
    np.testing.assert_allclose(derive.role_gram(gram_of(gradients), Z), gram_of(sums), rtol=1e-10)


def test_role_gram_of_absent_and_unrelated_roles():
    gram = np.full((4, 4), np.nan)
    gram[3, 3] = 2.0
    np.testing.assert_array_equal(derive.role_gram(gram, Z), [[np.nan, np.nan], [np.nan, 2]])
    gram[:3, :3] = np.eye(3)  # two policies: the roles are there, their products are not applicable
    np.testing.assert_array_equal(derive.role_gram(gram, Z), [[3, np.nan], [np.nan, 2]])
    gram[0, 0] = np.inf
    np.testing.assert_array_equal(derive.role_gram(gram, Z), [[np.inf, np.nan], [np.nan, 2]])


def test_coherence_and_amplification(gradients):
    gram = gram_of(gradients)
    for step, vectors in enumerate(gradients):
        there = vectors[~np.isnan(vectors[:, 0])]
        sizes = np.linalg.norm(there, axis=1)
        pairs = [(i, j) for i in range(len(there)) for j in range(len(there)) if i != j]
        top = sum(there[i] @ there[j] for i, j in pairs)
        bottom = sum(sizes[i] * sizes[j] for i, j in pairs)
        np.testing.assert_allclose(derive.coherence(gram)[step], top / bottom, rtol=1e-12)
        total = np.linalg.norm(there.sum(axis=0))
        num = len(there)
        np.testing.assert_allclose(derive.amplification(gram)[step], num * total / sizes.sum(), rtol=1e-12)
        orthogonal = num * np.linalg.norm(sizes) / sizes.sum()
        np.testing.assert_allclose(derive.amplification_if_orthogonal(gram)[step], orthogonal, rtol=1e-12)
        assert derive.amplification_if_aligned(gram)[step] == num


def test_the_lines_of_amplification_are_met():
    sizes = np.array([1.0, 2.0, 5.0])
    orthogonal, aligned = np.diag(sizes**2), np.outer(sizes, sizes)
    assert derive.coherence(orthogonal) == 0
    assert derive.coherence(aligned) == pytest.approx(1, rel=1e-15)
    assert derive.amplification(orthogonal) == derive.amplification_if_orthogonal(orthogonal)
    assert derive.amplification(aligned) == derive.amplification_if_aligned(aligned) == 3
    cancelling = gram_of(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    assert derive.coherence(cancelling) == -1
    assert derive.amplification(cancelling) == 0


def test_scale_and_order_of_slots_do_not_matter(gradients):
    gram = gram_of(gradients)
    turned = gram[:, ::-1, ::-1] * 64.0
    np.testing.assert_allclose(derive.coherence(turned), derive.coherence(gram), rtol=1e-12)
    np.testing.assert_allclose(derive.amplification(turned), derive.amplification(gram), rtol=1e-12)


def test_shares(gradients):
    roles = np.stack([np.nansum(gradients[:, :3], axis=1), gradients[:, 3]], axis=1)
    gram = derive.role_gram(gram_of(gradients), Z)
    sizes = np.linalg.norm(roles, axis=2)
    energy = sizes**2 / (sizes**2).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(derive.diagonal_share(gram), energy, rtol=1e-10)
    np.testing.assert_allclose(derive.norm_share(gram), sizes / sizes.sum(axis=1, keepdims=True), rtol=1e-10)
    total = roles.sum(axis=1)
    projections = np.einsum("trp,tp->tr", roles, total) / np.einsum("tp,tp->t", total, total)[:, None]
    np.testing.assert_allclose(derive.projection_share(gram), projections, rtol=1e-8)
    np.testing.assert_allclose(derive.projection_share(gram).sum(axis=1), 1, rtol=1e-10)


def test_no_gradient_at_all_is_undetermined_not_equal_shares():
    zero = np.zeros((3, 3))
    absent = np.full((3, 3), np.nan)
    for gram in (zero, absent):
        for measure in (derive.diagonal_share, derive.norm_share, derive.projection_share):
            assert np.isnan(measure(gram)).all()
        for measure in (derive.coherence, derive.amplification, derive.amplification_if_orthogonal):
            assert np.isnan(measure(gram))
        assert np.isnan(derive.cosines(gram)).all()
    assert derive.norms(zero).tolist() == [0, 0, 0]
    assert np.isnan(derive.amplification_if_aligned(absent))


def test_one_slot_has_no_coherence():
    gram = np.full((3, 3), np.nan)
    gram[1, 1] = 4.0
    assert np.isnan(derive.coherence(gram))
    assert derive.amplification(gram) == 1


def test_shares_by_counts_only():
    counts = np.array([[9.0, 1.0], [np.nan, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(derive.expected_energy_share(counts)[:2], [[0.9, 0.1], [np.nan, 1]])
    np.testing.assert_allclose(derive.expected_norm_share(counts)[:2], [[0.75, 0.25], [np.nan, 1]])
    assert np.isnan(derive.expected_energy_share(counts)[2]).all()


def test_shares_by_counts_are_met_by_independent_rows():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(12, 40_000))
    roles = np.stack([rows[:9].sum(axis=0), rows[9:].sum(axis=0)])
    # 40 000 independent coordinates: relative error of a squared norm about 0.7 %.
    np.testing.assert_allclose(
        derive.diagonal_share(gram_of(roles)), derive.expected_energy_share(np.array([9.0, 3.0])), rtol=0.03
    )


def test_pooling_leaves_absent_slots_out(gradients):
    pooled = derive.pooled(gram_of(gradients))
    np.testing.assert_allclose(pooled[1, 1], np.nansum(gram_of(gradients)[:, 1, 1]), rtol=1e-15)
    never = np.full((5, 2, 2), np.nan)
    assert np.isnan(derive.pooled(never)).all()


def test_energy_terms_add_up(gradients):
    rng = np.random.default_rng(1)
    names = ("num_rows", "num_signal_rows", "advantage_abs_sum", "loss_weight")
    counts = {name: rng.uniform(1, 9, (6, 4)) for name in names}
    gram = gram_of(gradients)
    terms = derive.energy_terms(gram, Z, counts)
    energy = np.diagonal(derive.role_gram(gram, Z), axis1=1, axis2=2)
    np.testing.assert_allclose(sum(terms.values()), np.log(energy), rtol=1e-12)
    doubled = derive.energy_terms(gram, Z, {**counts, "num_signal_rows": 2 * counts["num_signal_rows"]})
    np.testing.assert_allclose(doubled["count"] - terms["count"], np.log(4), rtol=1e-12)
    separate = np.nansum(np.diagonal(gram, axis1=1, axis2=2)[:, :3], axis=1)
    np.testing.assert_allclose(terms["coherence"][:, 0], np.log(energy[:, 0] / separate), rtol=1e-10)


def test_cosine_interval_covers_the_truth_and_needs_three_steps():
    rng = np.random.default_rng(5)
    direction = rng.normal(size=50)
    num_covered = 0
    for _ in range(100):
        vectors = direction + 2 * rng.normal(size=(60, 2, 2, 50))  # [T, halves, K, P]
        cross = np.einsum("tkp,tlp->tkl", vectors[:, 0], vectors[:, 1])
        value, low, high = derive.cosine_interval(cross + np.swapaxes(cross, 1, 2))
        num_covered += bool(low[0, 1] <= 1 <= high[0, 1])
        assert low[0, 1] <= value[0, 1] <= high[0, 1]
    # Both slots share one mean gradient, so their signal cosine is 1. A 95 % interval from ten blocks.
    assert num_covered >= 85
    few = np.full((9, 2, 2), np.nan)
    few[:2] = np.eye(2)
    assert np.isnan(derive.cosine_interval(few)[0]).all()


@pytest.fixture
def run(tmp_path, gradients):
    """Two updates a step of a shared policy; step 7 has none."""
    policies = {"g": "p", "a": "p"}
    with RunWriter(tmp_path, slots=SLOTS, policies=policies) as writer:
        for step in range(3):
            records = [
                UpdateRecord(
                    "p",
                    NAMES,
                    gram_of(gradients[2 * step + part]),
                    counts={"num_rows": np.where(np.isnan(gradients[2 * step + part, :, 0]), np.nan, 8.0)},
                    update_gram=gram_of(gradients[2 * step + part]),
                )
                for part in range(2)
            ]
            writer.append(step, records)
        writer.append(7)
    return open_run(tmp_path)


def test_a_step_is_the_sum_of_its_updates(run, gradients):
    gram = derive.step_gram(run, "p")
    assert gram.dims == ("step", "slot", "slot_b")
    assert gram["step"].values.tolist() == [0, 1, 2, 7]
    expected = np.nansum(gram_of(gradients).reshape(3, 2, 4, 4), axis=1)
    np.testing.assert_array_equal(gram.sel(step=[0, 1, 2]).values, expected)
    assert gram.sel(step=7).isnull().all()
    counts = derive.step_count(run, "p")
    np.testing.assert_array_equal(counts.sel(step=2), [8, 8, 16, 16])
    np.testing.assert_array_equal(derive.step_role_count(run, "p").sel(step=2), [32, 16])


def test_wrappers_equal_the_functions_on_arrays(run):
    gram = derive.step_gram(run, "p").values
    roles = derive.role_gram(gram, Z)
    np.testing.assert_array_equal(derive.step_role_gram(run, "p"), roles)
    np.testing.assert_array_equal(derive.role_norms(run, "p"), derive.norms(roles))
    shares = derive.role_shares(run, "p")
    np.testing.assert_array_equal(shares["energy"], derive.diagonal_share(roles))
    np.testing.assert_array_equal(shares["norm"], derive.norm_share(roles))
    np.testing.assert_array_equal(shares["expected_energy"].sel(step=0), [0.75, 0.25])
    assert shares["update"].dims == ("step", "contributor")
    np.testing.assert_allclose(shares["update"].sel(step=[0, 1, 2]).sum("contributor"), 1, rtol=1e-10)
    assert "signal" not in shares
    copies = derive.copy_measures(run, "p", "g")
    np.testing.assert_array_equal(copies["coherence"], derive.coherence(gram[:, :3, :3]))
    np.testing.assert_array_equal(copies["aligned"].sel(step=[0, 1, 2]), [3, 3, 3])
    assert np.isnan(derive.copy_measures(run, "p", "a")["coherence"]).all()


def test_separate_policies_keep_to_their_own_slots(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies={"g": "first", "a": "second"}) as writer:
        writer.append(0, UpdateRecord("first", NAMES[:3], np.eye(3)))
    run = open_run(tmp_path)
    assert derive.policies(run) == ["first", "second"]
    assert derive.step_role_gram(run, "first")["role"].values.tolist() == ["g"]
    assert derive.step_gram(run, "second").isnull().all()


def test_what_is_absent_is_said(tmp_path, run):
    with pytest.raises(UnknownNameError, match="unknown policy 'q'"):
        derive.step_gram(run, "q")
    with pytest.raises(RunFileError, match="/updates has no 'gram_cross'"):
        derive.step_gram(run, "p", variable="gram_cross")
    with RunWriter(tmp_path / "bare", slots=SLOTS, policies={"g": "p", "a": "p"}) as writer:
        writer.append(0)
    with pytest.raises(RunFileError, match="/updates has no 'gram'"):
        derive.role_shares(open_run(tmp_path / "bare"), "p")
