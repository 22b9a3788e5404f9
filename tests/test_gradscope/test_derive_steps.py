"""Steps of several updates: products are formed in each update, then summed; absent together is zero."""

import numpy as np
import pytest

from gradscope import derive, diagnose, find_capture, synthetic
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"w/0": "w", "w/1": "w", "j/0": "j"}
NAMES = tuple(SLOTS)
SHARED = {"w": "p", "j": "p"}


def gram_of(vectors):
    return vectors @ vectors.T


def record(names, vectors, **fields):
    return UpdateRecord("p", tuple(names), gram_of(np.asarray(vectors, dtype=float)), **fields)


@pytest.fixture
def apart(tmp_path):
    """One step of two updates of one policy: {w/0, j/0}, then {w/1}; w/0 and w/1 never share one."""
    first, second = np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([[2.0, -1.0]])
    with RunWriter(tmp_path, slots=SLOTS, policies=SHARED) as writer:
        writer.append(0, [record(["w/0", "j/0"], first), record(["w/1"], second)])
        writer.append(1, [record(["w/0", "j/0"], first)])
        writer.append(2)
    return open_run(tmp_path), first, second


def test_slots_that_share_no_update_of_a_step_have_product_zero(apart):
    run, first, second = apart
    gram = derive.step_gram(run, "p")
    own = gram_of(first)
    expected = [[own[0, 0], 0, own[0, 1]], [0, gram_of(second)[0, 0], 0], [own[1, 0], 0, own[1, 1]]]
    np.testing.assert_array_equal(gram.sel(step=0), expected)
    alone = gram.sel(step=1)
    assert alone.sel(slot="w/1").isnull().all()
    assert alone.sel(slot_b="w/1").isnull().all()
    assert gram.sel(step=2).isnull().all()


def test_role_energy_of_a_step_is_the_sum_of_its_updates_role_grams(apart):
    run, first, second = apart
    roles = derive.step_role_gram(run, "p")
    own = gram_of(first)
    expected = [[own[0, 0] + gram_of(second)[0, 0], own[0, 1]], [own[1, 0], own[1, 1]]]
    np.testing.assert_array_equal(roles.sel(step=0), expected)
    np.testing.assert_allclose(derive.role_norms(run, "p").sel(step=0), np.sqrt(np.diag(expected)))


def test_separate_policies_stay_apart(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies={"w": "p", "j": "q"}) as writer:
        records = [record(["w/0", "w/1"], np.eye(2)), UpdateRecord("q", ("j/0",), np.ones((1, 1)))]
        writer.append(0, records)
    run = open_run(tmp_path)
    assert derive.step_gram(run, "p")["slot"].values.tolist() == ["w/0", "w/1"]
    assert derive.step_gram(run, "q").values.tolist() == [[[1.0]]]


def test_contributions_of_updates_with_other_contributors_add_up(tmp_path):
    first, second = np.diag([4.0, 1.0, np.nan, np.nan]), np.diag([1.0, np.nan, np.nan, 2.0])
    first[0, 1] = first[1, 0] = 1.0
    for gram in (first, second):
        absent = np.isnan(np.diag(gram))
        gram[absent] = gram[:, absent] = np.nan
    with RunWriter(tmp_path, slots=SLOTS, policies=SHARED) as writer:
        records = [record(NAMES, np.eye(3), update_gram=gram) for gram in (first, second)]
        writer.append(0, records)
    shares = derive.role_shares(open_run(tmp_path), "p")["update"].isel(step=0)
    np.testing.assert_allclose(shares, [6 / 10, 2 / 10, np.nan, 2 / 10], rtol=1e-12)


def test_a_product_that_is_missing_though_both_are_there_stays_missing(tmp_path):
    gram = np.array([[1.0, np.nan, 0.0], [np.nan, 1.0, 0.0], [0.0, 0.0, 1.0]])
    with RunWriter(tmp_path, slots=SLOTS, policies=SHARED) as writer:
        writer.append(0, [UpdateRecord("p", NAMES, gram), UpdateRecord("p", NAMES, np.eye(3))])
    run = open_run(tmp_path)
    assert np.isnan(derive.step_gram(run, "p").values[0, 0, 1])
    assert np.isnan(derive.step_role_gram(run, "p").values[0, 0, 0])
    assert derive.step_role_gram(run, "p").values[0, 1, 1] == 2.0


def write_one_update_a_role(path, seed=0, num_steps=120):
    """A planted capture, in a loop that steps the shared policy once for each role."""
    roles = {"generator": 3, "aggregator": 1}
    slots = {f"{role}/{copy}": role for role, number in roles.items() for copy in range(number)}
    names = list(slots)
    series = synthetic.gradient_series(
        "capture", roles=roles, num_steps=num_steps, generator=np.random.default_rng(seed)
    )
    with RunWriter(path, slots=slots, policies=dict.fromkeys(roles, "p")) as writer:
        for step in range(num_steps):
            records = []
            for role in roles:
                own = [place for place, name in enumerate(names) if slots[name] == role]
                gram = series.gram[step][np.ix_(own, own)]
                records.append(UpdateRecord("p", tuple(names[place] for place in own), gram))
            metrics = {
                "response_tokens_mean": dict(zip(names, series.tokens[step].tolist(), strict=True)),
                "violation_fraction": dict(zip(names, series.violation[step].tolist(), strict=True)),
            }
            writer.append(step, records, metrics=metrics)
    return open_run(path), series


def test_capture_is_found_in_a_loop_that_steps_once_for_each_role(tmp_path):
    run, series = write_one_update_a_role(tmp_path)
    gram = derive.step_role_gram(run, "p")
    assert gram.sel(role="generator", role_b="aggregator").values.tolist() == [0.0] * 120
    (finding,) = [finding for finding in diagnose(run).findings if finding.kind == "capture"]
    assert (finding.strength, finding.role) == ("capture", series.role)
    assert abs(finding.step - series.onset) <= 24


def test_what_is_missing_is_named_truthfully(tmp_path):
    gram = np.tile(np.eye(2), (40, 1, 1))
    gram[:, 0, 1] = gram[:, 1, 0] = np.nan
    tokens, violation = np.full((40, 2), 100.0), np.full((40, 2), 0.1)
    assert find_capture(gram, tokens, violation).parts["missing"] == "products between the roles' gradients"
    nothing = np.full((40, 2), np.nan)
    missing = find_capture(np.tile(np.eye(2), (40, 1, 1)), nothing, nothing).parts["missing"]
    assert missing == "reply lengths and format violations of five steps in both windows"
    slots = {"w/0": "w", "j/0": "j"}
    with RunWriter(tmp_path, slots=slots, policies=SHARED) as writer:
        for step in range(40):
            metrics = {"response_tokens_mean": {"w/0": 100.0, "j/0": 100.0}}
            writer.append(step, UpdateRecord("p", ("w/0", "j/0"), gram[step]), metrics=metrics)
    (quiet,) = [finding for finding in diagnose(open_run(tmp_path)).quiet if finding.kind == "capture"]
    assert "cannot be told, the log lacks products between the roles' gradients" in quiet.sentence
    assert "reply lengths" not in quiet.sentence


def counted(path, **counts):
    metrics = {"response_tokens_mean": dict.fromkeys(NAMES, 50.0)}
    with RunWriter(path, slots=SLOTS, policies=SHARED) as writer:
        for step in range(40):
            writer.append(step, record(NAMES, np.eye(3), counts=counts), metrics=metrics)
    return open_run(path)


def test_counts_that_were_never_told_do_not_stand_for_others(tmp_path):
    # Probes hand in num_signal_rows as NaN where the loop gave no advantages.
    run = counted(tmp_path, num_rows=np.array([3.0, 3.0, 2.0]), num_signal_rows=np.full(3, np.nan))
    np.testing.assert_allclose(derive.role_shares(run, "p")["expected_energy"].isel(step=0), [0.75, 0.25])


def test_the_detectors_share_by_counts_is_that_of_derive(tmp_path):
    run = counted(tmp_path, num_rows=np.full(3, 8.0), num_signal_rows=np.array([8.0, 8.0, 4.0]))
    (quiet,) = [finding for finding in diagnose(run).quiet if finding.kind == "capture"]
    expected = float(derive.role_shares(run, "p")["expected_energy"].isel(step=0).sel(role="w"))
    assert expected == pytest.approx(0.8, rel=1e-12)
    assert quiet.evidence["share_expected"] == pytest.approx(expected, rel=1e-12)


def test_alignment_is_the_cosine_with_the_sum_of_those_that_are_there():
    vectors = np.random.default_rng(0).standard_normal((6, 3, 20))
    vectors[2, 1] = np.nan
    total = np.nansum(vectors, axis=1)
    expected = [
        [v @ t / np.linalg.norm(v) / np.linalg.norm(t) for v in vs]
        for vs, t in zip(vectors, total, strict=True)
    ]
    found = derive.alignments(vectors @ vectors.transpose(0, 2, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.isnan(derive.alignments(np.zeros((1, 2, 2)))).all()


def test_log_size_is_that_of_the_gradients_that_are_there():
    assert derive.log_size(np.array([[[4.0, 0], [0, np.nan]]]))[0] == pytest.approx(np.log(2))
    assert np.isnan(derive.log_size(np.zeros((1, 2, 2)))[0])
    assert np.isnan(derive.log_size(np.full((1, 2, 2), np.nan))[0])
