"""Slot labels permuted within problems: covers exchangeable copies, sees planted alignment and opposition."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope import derive
from gradscope.derive.sketches import permuted_labels
from gradscope.errors import SchemaError

NUM_PROBLEMS, COPIES, NUM_NUMBERS = 6, 3, 24
SLOTS = [f"generator/{number}" for number in range(COPIES)]


def rows(generator, *, per_slot=4, shared=1.0, plant=0.0, opposed=0.0):
    """Rows of copies: a gradient of their problem, noise of their own, and what is planted in some slots."""
    sketch, slot, problem = [], [], []
    common = generator.normal(size=NUM_NUMBERS)
    for number in range(NUM_PROBLEMS):
        mean = shared * generator.normal(size=NUM_NUMBERS)
        for copy, name in enumerate(SLOTS):
            for _ in range(per_slot):
                own = plant * common * (1 if copy < 2 else -1) - opposed * common * (copy - 1)
                sketch.append(mean + generator.normal(size=NUM_NUMBERS) + own)
                slot.append(name)
                problem.append(f"problem {number}")
    order = generator.permutation(len(slot))
    return np.array(sketch)[order], [slot[i] for i in order], [problem[i] for i in order]


def test_exchangeable_copies_are_within_the_null():
    p_values = []
    for seed in range(100):
        found = derive.permuted_alignment(*rows(np.random.default_rng(seed)), num_permutations=99, seed=seed)
        p_values.append((found.p_higher, found.p_lower, found.cosine_p_higher[0, 1]))
    # Coherence itself is high, since copies share their problems' gradients: only the null puts it right.
    assert found.coherence > 0.5
    at_most_a_twentieth = (np.array(p_values) <= 0.05).mean(axis=0)
    assert (at_most_a_twentieth <= 0.12).all()  # 5 % of 100, give or take three standard errors
    assert np.median(p_values) == pytest.approx(0.5, abs=0.15)


def test_planted_alignment_of_two_copies_is_seen():
    found = derive.permuted_alignment(*rows(np.random.default_rng(1), shared=0.3, plant=0.7))
    assert found.cosine_p_higher[found.slots.index(SLOTS[0]), found.slots.index(SLOTS[1])] <= 0.01
    other = found.slots.index(SLOTS[2])
    assert found.cosine_p_lower[other, found.slots.index(SLOTS[0])] <= 0.01


def test_copies_that_oppose_one_another_are_less_coherent_than_the_null():
    found = derive.permuted_alignment(*rows(np.random.default_rng(2), opposed=0.7))
    assert found.p_lower <= 0.01
    assert found.p_higher >= 0.9


def test_values_are_those_of_the_summed_rows():
    sketch, slot, problem = rows(np.random.default_rng(3))
    found = derive.permuted_alignment(sketch, slot, problem, num_permutations=3)
    sums = np.array([sketch[[name == own for name in slot]].sum(axis=0) for own in found.slots])
    assert found.cosine == pytest.approx(derive.cosines(sums @ sums.T), rel=1e-12)
    assert found.coherence == pytest.approx(float(derive.coherence(sums @ sums.T)), rel=1e-12)
    assert found.null_cosine.shape == (3, COPIES, COPIES)


def test_labels_stay_in_their_problem():
    generator = np.random.default_rng(0)
    problem = generator.integers(5, size=40)
    label = generator.integers(3, size=40)
    permuted = permuted_labels(label, problem, 50, seed=0)
    for number in range(5):
        own = problem == number
        assert (np.sort(permuted[:, own], axis=1) == np.sort(label[own])).all()
    assert (permuted != label).any()
    assert (permuted != permuted[0]).any()


def test_a_problem_with_one_row_cannot_be_permuted():
    found = derive.permuted_alignment(np.eye(4), ["a", "b", "a", "b"], [0, 1, 2, 3], num_permutations=9)
    assert found.p_higher == found.p_lower == 1.0


def test_without_gradients_nothing_is_determined():
    found = derive.permuted_alignment(np.zeros((4, 2)), ["a", "b", "a", "b"], [0, 0, 1, 1])
    assert np.isnan(found.coherence)
    assert np.isnan(found.p_higher)


@pytest.mark.parametrize(
    ("sketch", "slot", "message"),
    [
        (np.zeros((2, 3)), ["a", "b", "a"], "expected"),
        (np.full((2, 3), np.nan), ["a", "b"], "missing or infinite"),
        (np.zeros((2, 3)), ["a", "a"], "at least two"),
    ],
)
def test_refusals(sketch, slot, message):
    with pytest.raises(SchemaError, match=message):
        derive.permuted_alignment(sketch, slot, [0, 0])
