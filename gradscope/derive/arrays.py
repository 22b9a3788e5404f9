"""What follows from stored products, on arrays `[..., K, K]`. Definitions: docs/words.md.

K is the number of slots, R of roles, C of contributors. A slot whose diagonal is NaN had no rows and is
absent: sums go over the others. A quantity that is 0/0 (no gradient at all) is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def norms(gram: Array) -> Array:
    """Returns the norms n_k = sqrt G_kk, `[..., K]`; NaN for an absent slot or a negative estimate."""
    diagonal = _diagonal(gram)
    return np.sqrt(np.where(diagonal >= 0, diagonal, np.nan))


def cosines(gram: Array) -> Array:
    """Returns G_kl / (n_k n_l), `[..., K, K]`; NaN where a norm is 0 or a slot absent.

    On a Gram these are the realised cosines, on a sum of cross Grams the signal cosines.
    """
    sizes = norms(gram)
    return _ratio(gram, sizes[..., :, None] * sizes[..., None, :])


def membership(slot_groups: Sequence[str], groups: Sequence[str]) -> Array:
    """Returns the 0/1 matrix Z, `[K, R]`, that says which slot belongs to which role."""
    return np.array([[float(own == group) for group in groups] for own in slot_groups])


def role_gram(gram: Array, membership_KR: Array) -> Array:
    """Returns Z'GZ, `[..., R, R]`: products of the roles' gradients, which are sums of slot gradients.

    A role all of whose slots are absent is NaN. So is a pair of roles with two slots that are both there
    but have no product, as those of separate policies.
    """
    present = ~np.isnan(_diagonal(gram))
    known = np.where(present[..., :, None] & present[..., None, :], gram, 0.0)
    # Summed role by role, as a product with Z would spread 0 x NaN and 0 x Inf over all of them.
    groups = [np.flatnonzero(column) for column in membership_KR.T]
    summed = np.empty((*gram.shape[:-2], len(groups), len(groups)))
    for row, own in enumerate(groups):
        for column, other in enumerate(groups):
            block = known[..., own[:, None], other].sum(axis=(-2, -1))
            there = present[..., own].any(axis=-1) & present[..., other].any(axis=-1)
            summed[..., row, column] = np.where(there, block, np.nan)
    return summed


def coherence(gram: Array) -> Array:
    """Returns kappa = sum_{i!=j} G_ij / sum_{i!=j} n_i n_j over the slots given, `[...]`.

    0 when their gradients are orthogonal, 1 when aligned, negative when they cancel, whatever their norms.
    """
    sizes = np.nan_to_num(norms(gram))
    apart = ~np.eye(gram.shape[-1], dtype=bool)  # a difference of full sums would cancel digits
    products = _present_sum(np.where(apart, gram, np.where(np.isnan(gram), np.nan, 0.0)))
    largest = np.where(apart, sizes[..., :, None] * sizes[..., None, :], 0.0).sum(axis=(-2, -1))
    return _ratio(products, largest, enough=num_present(gram) >= 2)


def amplification(gram: Array) -> Array:
    """Returns the gradient amplification N |sum_i g_i| / sum_i n_i of the slots given, `[...]`."""
    total = np.sqrt(np.maximum(_present_sum(gram), 0.0))
    return _ratio(num_present(gram) * total, np.nansum(norms(gram), axis=-1))


def amplification_if_orthogonal(gram: Array) -> Array:
    """Returns N |n|_2 / |n|_1, what `amplification` is for orthogonal gradients of these norms, `[...]`."""
    sizes = norms(gram)
    return _ratio(num_present(gram) * np.sqrt(np.nansum(sizes**2, axis=-1)), np.nansum(sizes, axis=-1))


def amplification_if_aligned(gram: Array) -> Array:
    """Returns N, what `amplification` is for aligned gradients, `[...]`; NaN without any slot."""
    num = num_present(gram)
    return np.where(num > 0, num, np.nan)


def num_present(gram: Array) -> Array:
    """Returns how many slots are there, `[...]`."""
    return (~np.isnan(_diagonal(gram))).sum(axis=-1).astype(float)


def diagonal_share(gram: Array) -> Array:
    """Returns G_RR / sum_R G_RR, `[..., R]`.

    Of a role Gram it is the *energy share*, of a summed cross Gram of roles the *signal share*.
    """
    diagonal = _diagonal(gram)
    return _ratio(diagonal, _total(diagonal))


def norm_share(gram: Array) -> Array:
    """Returns |g_R| / sum_R |g_R|, `[..., R]`: the study's "gradient mass"."""
    sizes = norms(gram)
    return _ratio(sizes, _total(sizes))


def projection_share(gram: Array) -> Array:
    """Returns <g_R, g> / |g|^2 with g = sum_R g_R, `[..., R]`.

    Sums to 1; negative means overruled. Of `update_gram` it is the *update share*.
    """
    return _ratio(_row_sums(gram), _present_sum(gram)[..., None])


def expected_energy_share(counts: Array) -> Array:
    """Returns the energy share `[..., R]` if roles differed in their numbers of rows `[..., R]` only.

    Independent rows of equal size add up to a squared norm that grows with their number.
    """
    return _ratio(counts, _total(counts))


def expected_norm_share(counts: Array) -> Array:
    """Returns the norm share `[..., R]` if roles differed in their numbers of rows `[..., R]` only."""
    roots = np.sqrt(counts)
    return _ratio(roots, _total(roots))


def pooled(grams: Array) -> Array:
    """Returns the sum over the first axis, `[T, ..., K, K]` to `[..., K, K]`; NaN where never there."""
    there = ~np.isnan(grams)
    return np.where(there.any(axis=0), np.where(there, grams, 0.0).sum(axis=0), np.nan)


def summed(grams: Array, starts: NDArray[np.intp]) -> Array:
    """Returns the sums of runs of updates, `[U, K, K]` to `[S, K, K]`; a sum of squares, not its square.

    An update that lacks one of two gradients adds nothing to their product, so the product of two that
    never share an update is 0. NaN where one of them is in none, and where a product is missing although
    both are there.

    Args:
        grams: One matrix an update.
        starts: First update of each run, increasing, `[S]`.
    """
    present = ~np.isnan(_diagonal(grams))
    both = present[..., :, None] & present[..., None, :]
    sums = np.add.reduceat(np.where(both, grams, 0.0), starts, axis=0)
    ever = np.logical_or.reduceat(present, starts, axis=0)
    return np.where(ever[..., :, None] & ever[..., None, :], sums, np.nan)


def alignments(gram: Array) -> Array:
    """Returns the cosine of each gradient with the sum of all, `[..., K]`; NaN where either is 0."""
    total = np.sqrt(np.maximum(_present_sum(gram), 0.0))
    return _ratio(_row_sums(gram), norms(gram) * total[..., None])


def log_size(gram: Array) -> Array:
    """Returns half the log of the mean squared norm of the gradients that are there, `[...]`.

    The mean, not the sum, so that a copy that sits out a step does not look like a smaller gradient. NaN
    where all are 0.
    """
    return 0.5 * _log(_ratio(np.nansum(_diagonal(gram), axis=-1), num_present(gram)))


def energy_terms(gram: Array, membership_KR: Array, counts: Mapping[str, Array]) -> dict[str, Array]:
    """Splits log |g_R|^2 into what makes a role's gradient large; the terms, each `[..., R]`, add up to it.

    Args:
        gram: Products of the slots, `[..., K, K]`.
        membership_KR: Which slot belongs to which role, `[K, R]`.
        counts: num_rows, num_signal_rows, advantage_abs_sum and loss_weight, each `[..., K]`.

    Returns:
        weight (mean applied loss weight of a row), count (rows with signal), advantage (their mean advantage
        magnitude), coherence (of the role's slots: |sum g|^2 / sum |g|^2) and score (what is left: size and
        agreement of the per-problem score gradients).
    """
    sums = {name: np.nan_to_num(value) @ membership_KR for name, value in counts.items()}
    energy = _diagonal(role_gram(gram, membership_KR))
    separate = np.nan_to_num(_diagonal(gram)) @ membership_KR
    terms = {
        "weight": 2 * _log(_ratio(sums["loss_weight"], sums["num_rows"])),
        "count": 2 * _log(sums["num_signal_rows"]),
        "advantage": 2 * _log(_ratio(sums["advantage_abs_sum"], sums["num_signal_rows"])),
        "coherence": _log(_ratio(energy, separate)),
    }
    return {**terms, "score": _log(energy) - sum(terms.values())}


def cosine_interval(grams: Array, *, num_blocks: int = 10, width: float = 1.96) -> tuple[Array, Array, Array]:
    """Returns cosines of the summed products and their block-jackknife interval.

    Numerators and denominators are pooled before they are divided. Blocks are runs of neighbouring steps, as
    neighbours are alike.

    Args:
        grams: Products over time, `[T, K, K]`; cross Grams give the signal cosine.
        num_blocks: How many blocks are left out in turn.
        width: Standard errors on each side.

    Returns:
        Value, lower and upper end, each `[K, K]`; all NaN where fewer than three steps have both slots.
    """
    diagonal = _diagonal(grams)
    signal = ~np.isnan(diagonal) & (diagonal != 0)
    enough = (signal[:, :, None] & signal[:, None, :]).sum(axis=0) >= 3
    value = np.where(enough, cosines(pooled(grams)), np.nan)
    blocks = [block for block in np.array_split(np.arange(len(grams)), num_blocks) if len(block)]
    left_out = np.array([cosines(pooled(np.delete(grams, block, axis=0))) for block in blocks])
    centre = left_out.mean(axis=0) if len(blocks) else value
    scale = (len(blocks) - 1) / max(len(blocks), 1)
    error = np.sqrt(scale * ((left_out - centre) ** 2).sum(axis=0))
    return value, value - width * error, value + width * error


def _diagonal(gram: Array) -> Array:
    return np.diagonal(gram, axis1=-2, axis2=-1)


def _row_sums(gram: Array) -> Array:
    """Returns the sum of each slot's products with all that are there; NaN for one that is not."""
    present = ~np.isnan(_diagonal(gram))
    both = present[..., :, None] & present[..., None, :]
    return np.where(present, np.where(both, gram, 0.0).sum(axis=-1), np.nan)


def _present_sum(gram: Array) -> Array:
    """Returns the sum over all pairs of slots that are there; a missing product of two such is NaN."""
    present = ~np.isnan(_diagonal(gram))
    return np.where(present, _row_sums(gram), 0.0).sum(axis=-1)


def _total(values: Array) -> Array:
    return np.nansum(values, axis=-1, keepdims=True)


def _ratio(top: Array, bottom: Array, *, enough: NDArray[np.bool_] | bool = True) -> Array:
    sound = (bottom != 0) & ~np.isnan(bottom) & enough
    return np.where(sound, np.divide(top, np.where(sound, bottom, 1.0)), np.nan)


def _log(values: Array) -> Array:
    return np.log(np.where(values > 0, values, np.nan))
