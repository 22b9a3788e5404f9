"""Terminal accuracy cliffs: a late, lasting fall of evaluation accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.stats.evaluations import Evaluations, dispersion, order_evaluations
from gradscope.stats.steps import as_step
from gradscope.stats.two_window import fall_p_value, strongest_fall, widths_for

Array = NDArray[np.float64]

MARGIN = 0.03
"""A fall of three points of accuracy or less is not worth mention."""
STRONG = 3.0
FOUND = 2.0
POSSIBLE = 1.5
"""Thresholds of the score, calibrated on the statistic defined here (reference/logs_and_detectors.md 5.1)."""


@dataclass(frozen=True)
class Cliff:
    """A late, lasting fall of accuracy, or how near the series came to one.

    Attributes:
        score: Standard errors by which the fall exceeds three points, both next to the break and at the end.
        verdict: `strong` above 3, `cliff` above 2, `possible` above 1.5, else `none`; `undetermined` with
            fewer than nine evaluations.
        index: First evaluation after the break, as a position in the caller's arrays (its first row, where the
            evaluation was repeated). Also given where the verdict is `none`; None where undetermined.
        step: `step[index]`; None where no steps were given or nothing is determined.
        before: Accuracy in the window before the break, 0 to 1.
        after: Accuracy in the last window of the run, 0 to 1.
        depth: `before - after`. The break is chosen as the largest, so a depth near the margin is flattered.
        interval: 95 % interval of the depth, with the scatter between evaluations.
        p_value: How often a run that never falls looks as much like one that does (margin 0).
    """

    score: float
    verdict: str
    index: int | None
    step: int | float | None
    before: float
    after: float
    depth: float
    interval: tuple[float, float]
    p_value: float


def find_cliff(num_correct: ArrayLike, num_total: ArrayLike, *, step: ArrayLike | None = None) -> Cliff:
    """Returns the strongest lasting fall of accuracy in the later part (from 40 % on) of a run's evaluations.

    The evaluations are put in order of `step`; identical repeats of one are one, differing repeats are pooled.
    The score compares windows of 3 to 20 evaluations before a break with the same number after it and at the
    end, and counts the smaller fall, so a recovery, a slow decline and a lucky peak do not pass for a cliff.
    A fall that exists in the final evaluation alone cannot be told from one bad evaluation.

    Args:
        num_correct: `[E]` problems answered right.
        num_total: `[E]`, or one number for all.
        step: `[E]` training steps in any order, repeats allowed; None when the rows stand in order.

    Raises:
        SchemaError: Shapes that do not fit, or counts that cannot be.
    """
    series = order_evaluations(num_correct, num_total, step)
    if not widths_for(series.correct.size):
        nan = float("nan")
        return Cliff(nan, "undetermined", None, None, nan, nan, nan, (nan, nan), nan)
    fall = strongest_fall(series.correct, series.total, margin=MARGIN)
    score, place, width = float(fall.score), int(fall.index), int(fall.width)
    before, after, error = _depth(series, place, width)
    return Cliff(
        score=score,
        verdict=_verdict(score),
        index=int(series.source[place]),
        step=as_step(series.step, place),
        before=before,
        after=after,
        depth=before - after,
        interval=(before - after - 1.96 * error, before - after + 1.96 * error),
        p_value=fall_p_value(series.correct, series.total),
    )


def _verdict(score: float) -> str:
    if score > STRONG:
        return "strong"
    if score > FOUND:
        return "cliff"
    return "possible" if score > POSSIBLE else "none"


def _depth(series: Evaluations, place: int, width: int) -> tuple[float, float, float]:
    """Returns accuracy before the break, accuracy at the end, and the standard error of the difference."""
    length = series.correct.size
    scatter = float(dispersion(series.correct, series.total))
    accuracies, variance = [], 0.0
    for rows in (slice(place - width, place), slice(max(place, length - width), length)):
        right, asked = float(series.correct[rows].sum()), float(series.total[rows].sum())
        accuracies.append(right / asked)
        centred = (right + 0.5) / (asked + 1.0)
        variance += scatter * centred * (1.0 - centred) / asked
    return accuracies[0], accuracies[1], float(np.sqrt(variance))
