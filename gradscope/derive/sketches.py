"""Whether slots are aligned beyond what exchangeable copies are, from the sketches of single rows.

Parallel copies with one prompt and a broadcast reward are exchangeable: their mean gradients are equal by
construction, so that their coherence tells signal from noise and nothing about the copies. It becomes
evidence only beside the same number with the slot labels permuted within each problem. The comparison is
exact whatever the error of the sketches, since both sides are read off the same ones.

N is the number of rows, S of numbers in a sketch, K of slots, B of permutations.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.derive.arrays import coherence, cosines
from gradscope.errors import SchemaError

Array = NDArray[np.float64]

NUM_PERMUTATIONS = 999


@dataclass(frozen=True)
class PermutedAlignment:
    """Alignment of slots beside its values under permuted labels.

    Attributes:
        slots: Names along K.
        coherence: kappa of the slots' gradients; NaN without gradients.
        cosine: Their cosines, `[K, K]`.
        null_coherence: kappa under permuted labels, `[B]`.
        null_cosine: Cosines under permuted labels, `[B, K, K]`.
    """

    slots: tuple[str, ...]
    coherence: float
    cosine: Array
    null_coherence: Array
    null_cosine: Array

    @property
    def p_higher(self) -> float:
        """How often permuted labels are at least as coherent, 1/(B+1) to 1."""
        return float(_share_at_least(np.asarray(self.coherence), self.null_coherence))

    @property
    def p_lower(self) -> float:
        """How often permuted labels are at most as coherent, 1/(B+1) to 1."""
        return float(_share_at_least(np.asarray(-self.coherence), -self.null_coherence))

    @property
    def cosine_p_higher(self) -> Array:
        """The same as `p_higher` for each pair of slots, `[K, K]`; not corrected for their number."""
        return _share_at_least(self.cosine, self.null_cosine)

    @property
    def cosine_p_lower(self) -> Array:
        """The same as `p_lower` for each pair of slots, `[K, K]`."""
        return _share_at_least(-self.cosine, -self.null_cosine)


def permuted_alignment(
    sketch: ArrayLike,
    slot: Sequence[str],
    problem: Sequence[Hashable],
    *,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
) -> PermutedAlignment:
    """Compares the alignment of slots with that of slots whose labels are permuted within each problem.

    Give it the rows of one update, of slots that could be exchangeable, such as the copies of one role. Rows
    of a problem that has one slot only take part unchanged.

    Args:
        sketch: Sketches (or whole gradients) of the rows, `[N, S]`.
        slot: Slot of each row.
        problem: Problem of each row.
        num_permutations: B.
        seed: Seed of the permutations.

    Raises:
        SchemaError: Not one slot and problem for each row, sketches that are not finite, or a single slot.
    """
    rows = np.asarray(sketch, dtype=np.float64)
    if rows.ndim != 2 or not len(rows) == len(slot) == len(problem):
        raise SchemaError(
            f"permuted_alignment: sketch has shape {rows.shape}, slot {len(slot)} and problem {len(problem)} "
            "entries; expected [N, S] and N each."
        )
    if not np.isfinite(rows).all():
        raise SchemaError("permuted_alignment: some sketches are missing or infinite; leave those rows out.")
    slots = tuple(dict.fromkeys(slot))
    if len(slots) < 2:
        raise SchemaError(f"permuted_alignment: rows of {len(slots)} slot; alignment takes at least two.")
    label_N = np.array([slots.index(own) for own in slot])
    problems = list(dict.fromkeys(problem))
    problem_N = np.array([problems.index(own) for own in problem])
    observed = _gram(rows, label_N[None], len(slots))[0]
    null = _gram(rows, permuted_labels(label_N, problem_N, num_permutations, seed=seed), len(slots))
    return PermutedAlignment(
        slots, float(coherence(observed)), cosines(observed), coherence(null), cosines(null)
    )


def permuted_labels(
    label_N: NDArray[np.int64], problem_N: NDArray[np.int64], num: int, *, seed: int
) -> NDArray[np.int64]:
    """Returns labels permuted among the rows of each problem, `[num, N]`."""
    generator = np.random.default_rng(seed)
    by_problem = np.argsort(problem_N, kind="stable")
    # Random ranks within problems: rows of a problem stay together and change places.
    ranks = generator.random((num, len(label_N)))
    shuffled = np.lexsort((ranks, np.broadcast_to(problem_N, ranks.shape)), axis=-1)
    permuted = np.empty((num, len(label_N)), dtype=np.int64)
    permuted[:, by_problem] = label_N[shuffled]
    return permuted


def _gram(rows_NS: Array, label_BN: NDArray[np.int64], num_slots: int) -> Array:
    """Returns the products of the slots' sums for each labelling, `[B, K, K]`."""
    grams = np.empty((len(label_BN), num_slots, num_slots))
    for at, label_N in enumerate(label_BN):
        sums_KS = (label_N == np.arange(num_slots)[:, None]).astype(np.float64) @ rows_NS
        grams[at] = sums_KS @ sums_KS.T
    return grams


def _share_at_least(observed: Array, null_B: Array) -> Array:
    """Returns (1 + number of null values at least as large) / (1 + B); NaN where nothing was observed."""
    # Equal values may differ by the order in which they were summed.
    as_large = (null_B >= observed - 1e-12 * np.maximum(1.0, np.abs(observed))).sum(axis=0)
    return np.where(np.isnan(observed), np.nan, (1 + as_large) / (1 + len(null_B)))
