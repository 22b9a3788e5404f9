"""The two-window statistic of a lasting fall, over many series at once, and its p-value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.evaluations import dispersion

Array = NDArray[np.float64]

WIDTHS = (3, 5, 8, 12, 20)
"""Window widths that are tried, in evaluations."""
EARLIEST = 0.4
"""A break counts from this fraction of the series on: before it, a fall is not terminal."""
LEVEL_FROM = 0.2
"""The plateau's level is the accuracy from this fraction of the series on: where windows are compared."""
CHUNK = 2_000_000
"""Numbers held at once while bootstrapping."""


@dataclass(frozen=True)
class Fall:
    """The strongest lasting fall of each series.

    Attributes:
        score: Standard errors by which the fall exceeds the margin, `[...]`.
        index: First evaluation after the break, `[...]`.
        width: Window width that shows it, `[...]`.
    """

    score: Array
    index: NDArray[np.intp]
    width: NDArray[np.intp]


def widths_for(num_evaluations: int) -> list[int]:
    """Returns the widths of which three windows fit into the series; none below nine evaluations."""
    return [width for width in WIDTHS if 3 * width <= num_evaluations]


def strongest_fall(correct: Array, total: Array, *, margin: float) -> Fall:
    """Returns the break after which accuracy is lower both next to it and at the end of the series.

    For a width w and a break c, z compares the w evaluations before c with the w from c on, and with the last
    w; the smaller z counts, so a recovery before the end counts against it. The score is the largest over all
    widths and breaks (docs/detectors.md) from 40 % of the series on; there, a break that
    falls short of an earlier one inside its own window only echoes that one and does not count.

    Args:
        correct: `[..., T]`, T at least 9.
        total: `[T]`.
        margin: Fall in accuracy that is not worth mention, 0 to 1.
    """
    length = correct.shape[-1]
    scatter = dispersion(correct, total)[..., None]
    right = _running_sum(correct)
    asked = _running_sum(total)
    best = Fall(
        np.full(correct.shape[:-1], -np.inf),
        np.zeros(correct.shape[:-1], dtype=np.intp),
        np.zeros(correct.shape[:-1], dtype=np.intp),
    )
    for width in widths_for(length):
        breaks = np.arange(width, length)
        before = (breaks - width, breaks)
        beside = (breaks, np.minimum(length, breaks + width))
        ending = (np.maximum(breaks, length - width), np.full_like(breaks, length))
        score = np.minimum(
            _fall_z(right, asked, before, beside, scatter, margin),
            _fall_z(right, asked, before, ending, scatter, margin),
        )
        late = max(width, int(np.ceil(EARLIEST * length))) - width
        score = _without_echoes(score, late, width)
        place = np.argmax(score, axis=-1)
        top = np.take_along_axis(score, place[..., None], axis=-1)[..., 0]
        better = top > best.score
        best = Fall(
            np.where(better, top, best.score),
            np.where(better, breaks[late + place], best.index),
            np.where(better, width, best.width),
        )
    return best


def fall_p_value(correct: Array, total: Array, *, num_replicates: int = 999, seed: int = 0) -> float:
    """Returns how often a run that never falls would show as strong a fall, between 1/(B+1) and 1.

    Parametric bootstrap on a plateau: of all curves that never fall, the one that most often looks like a
    fall (the non-decreasing fit to the data would take noise for a rise, and so call too much a fall).
    Replicates are binomial draws whose distance from the mean is stretched where the data scatter
    more than that. The margin is 0 here, so this asks whether it fell at all, the score whether by more than
    the margin.

    Args:
        correct: `[T]`, T at least 9.
        total: `[T]`.
        num_replicates: B.
        seed: Of the replicates; the same data always give the same p-value.
    """
    observed = float(strongest_fall(correct, total, margin=0.0).score)
    plateau = slice(int(LEVEL_FROM * correct.size), None)
    level = correct[plateau].sum() / total[plateau].sum()
    spread = np.sqrt(max(1.0, float(dispersion(correct, total))))
    generator = np.random.default_rng(seed)
    chunk = max(1, CHUNK // correct.size)
    as_strong = 0
    for start in range(0, num_replicates, chunk):
        shape = (min(chunk, num_replicates - start), correct.size)
        drawn = generator.binomial(total.astype(np.int64), level, size=shape)
        mean = total * level
        replicates = np.clip(np.rint(mean + spread * (drawn - mean)), 0.0, total)
        as_strong += int(np.sum(strongest_fall(replicates, total, margin=0.0).score >= observed - 1e-12))
    return (1 + as_strong) / (1 + num_replicates)


def _running_sum(counts: Array) -> Array:
    """Returns sums of the first 0, 1, ..., T entries of the last axis, `[..., T + 1]`."""
    padding = [(0, 0)] * (counts.ndim - 1) + [(1, 0)]
    return np.pad(np.cumsum(counts, axis=-1), padding)


def _without_echoes(score: Array, late: int, width: int) -> Array:
    """Returns the scores of the breaks from position `late` on; -inf where one shortly before is larger.

    Args:
        score: `[..., C]` of all breaks in order.
        late: Position of the first break that counts.
        width: How far back a break's own window reaches, in positions.
    """
    if not late:
        return score
    # Largest score among the early breaks from each position on: what a window that starts there overlaps.
    reach = np.maximum.accumulate(score[..., late - 1 :: -1], axis=-1)[..., ::-1]
    starts = np.arange(score.shape[-1] - late) + late - width
    overlaps = starts < late
    earlier = np.where(overlaps, reach[..., np.clip(starts, 0, late - 1)], -np.inf)
    kept = score[..., late:]
    return np.where(kept >= earlier, kept, -np.inf)


def _fall_z(
    right: Array,
    asked: Array,
    early: tuple[NDArray[np.intp], NDArray[np.intp]],
    late: tuple[NDArray[np.intp], NDArray[np.intp]],
    scatter: Array,
    margin: float,
) -> Array:
    """Returns the z of each early window's accuracy above its late window's plus the margin, `[..., C]`."""
    right_early = right[..., early[1]] - right[..., early[0]] + 0.5
    right_late = right[..., late[1]] - right[..., late[0]] + 0.5
    asked_early = asked[early[1]] - asked[early[0]] + 1.0
    asked_late = asked[late[1]] - asked[late[0]] + 1.0
    pooled = (right_early + right_late) / (asked_early + asked_late)
    variance = scatter * pooled * (1.0 - pooled) * (1.0 / asked_early + 1.0 / asked_late)
    return (right_early / asked_early - right_late / asked_late - margin) / np.sqrt(variance)
