"""Terminal accuracy cliffs: a late, lasting fall of evaluation accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from gradscope.detectors.finding import Evidence, Finding, Skipped
from gradscope.detectors.series import sound_evaluations, table
from gradscope.detectors.wording import at_step, percent, points, score
from gradscope.stats.evaluations import (
    Evaluations,
    Setting,
    dispersion,
    evaluation_series,
    order_evaluations,
)
from gradscope.stats.steps import as_step
from gradscope.stats.two_window import fall_p_value, strongest_fall, widths_for

FEWEST = 9
"""Evaluated steps that three windows of three need."""
MARGIN = 0.03
"""A fall of three points of accuracy or less is not worth mention."""
STRONG = 3.0
FOUND = 2.0
POSSIBLE = 1.5
"""Thresholds of the score; docs/detectors.md says where they were calibrated."""
FALSE_ALARMS = "3 % of simulated curves without a cliff exceed 2, 9 % of those with 30 problems"
"""From `tests/benchmarks/false_alarms.py --runs 1000`; docs/detectors.md holds its tables."""


@dataclass(frozen=True)
class Cliff:
    """A late, lasting fall of accuracy, or how near the series came to one.

    Attributes:
        score: Standard errors by which the fall exceeds three points, both next to the break and at the end.
        verdict: `strong` above 3, `cliff` above 2, `possible` above 1.5, else `none`; `undetermined` with
            fewer than nine evaluations.
        index: First evaluation after the break, as a position in the caller's arrays (its first row, where
            the evaluation was repeated). Also given where the verdict is `none`; None where undetermined.
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

    The evaluations are put in order of `step`; identical repeats of one are one, differing repeats are
    pooled. The score compares windows of 3 to 20 evaluations before a break with the same number after it and
    at the end, and counts the smaller fall, so a recovery, a slow decline and a lucky peak do not pass for a
    cliff. A fall that exists in the final evaluation alone cannot be told from one bad evaluation.

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
    place, width = int(fall.index), int(fall.width)
    before, after, error = _depth(series, place, width)
    return Cliff(
        score=float(fall.score),
        verdict=_verdict(float(fall.score)),
        index=int(series.source[place]),
        step=None if step is None else as_step(series.step, place),
        before=before,
        after=after,
        depth=before - after,
        interval=(before - after - 1.96 * error, before - after + 1.96 * error),
        p_value=fall_p_value(series.correct, series.total),
    )


def _verdict(value: float) -> str:
    if value > STRONG:
        return "strong"
    if value > FOUND:
        return "cliff"
    return "possible" if value > POSSIBLE else "none"


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


def detect(run: xr.DataTree) -> list[Finding]:
    """Looks for a terminal accuracy cliff in each data set, under each sampling setting on its own.

    Raises:
        Skipped: The run holds no evaluations, or counts that cannot be.
    """
    sound_evaluations(run)
    every = evaluation_series(run)
    if not every:
        raise Skipped("no evaluation of the run has counts")
    resumed = _resumed_steps(run)
    return [_finding(setting, series, resumed) for setting, series in every.items()]


def _resumed_steps(run: xr.DataTree) -> list[float]:
    segments = table(run, "segments")
    if "start_step" not in segments:
        return []
    return [float(start) for start in segments["start_step"].values[1:] if np.isfinite(start)]


def _finding(setting: Setting, series: Evaluations, resumed: list[float]) -> Finding:
    step = series.step
    cliff = find_cliff(series.correct, series.total, step=step)
    best = int(np.argmax(series.accuracy))
    where = f"'{setting.dataset}'{f' ({setting.sampling})' if setting.sampling else ''}"
    evidence: Evidence = {
        "setting": where,
        "score": cliff.score,
        "p_value": cliff.p_value,
        "before": cliff.before,
        "after": cliff.after,
        "depth": cliff.depth,
        "depth_low": cliff.interval[0],
        "depth_high": cliff.interval[1],
        "num_evaluations": int(step.size),
        "break_step": cliff.step,
        "peak": float(series.accuracy[best]),
        "peak_step": int(step[best]),
    }
    if cliff.step is None:
        sentence = (
            f"Accuracy cliff on {where}: cannot be told from {evidence['num_evaluations']} evaluated "
            f"steps; {FEWEST} are needed."
        )
        return Finding("cliff", None, None, cliff.verdict, evidence, sentence)
    if cliff.verdict == "none":
        sentence = (
            f"Accuracy cliff on {where}: none in {evidence['num_evaluations']} evaluated steps; the most "
            f"cliff-like break, {at_step(cliff.step)}, scores {score(cliff.score)} (a cliff above {FOUND:g})."
        )
        return Finding("cliff", None, None, cliff.verdict, evidence, sentence)
    at_the_end = cliff.step == step[-1]
    sentence = _fall_sentence(cliff, evidence, at_the_end=at_the_end) + _cautions(cliff.step, step, resumed)
    return Finding("cliff", None, cliff.step, cliff.verdict, evidence, sentence)


def _fall_sentence(cliff: Cliff, evidence: Evidence, *, at_the_end: bool) -> str:
    heads = {
        "strong": "Strong accuracy cliff",
        "cliff": "Accuracy cliff",
        "possible": "Possible accuracy cliff",
    }
    low, high = (100.0 * bound for bound in cliff.interval)
    lasting = ", the last one evaluated" if at_the_end else " and stayed down to the end of the run"
    return (
        f"{heads[cliff.verdict]} on {evidence['setting']}: accuracy fell at {at_step(cliff.step)}{lasting}, "
        f"from {percent(cliff.before)} to {percent(cliff.after)}, by "
        f"{points(cliff.depth)} (95 % interval {low:.1f} to {high:.1f}). Score {score(cliff.score)} (a cliff "
        f"above {FOUND:g}, strong above {STRONG:g}; {FALSE_ALARMS}); a run that never falls looks like this "
        f"with p = {cliff.p_value:.2g}. The best single evaluation, "
        f"{percent(float(evidence['peak'] or 0.0))} at step {evidence['peak_step']}, is the luckiest of "
        f"{evidence['num_evaluations']} and no baseline."
    )


def _cautions(onset: float, steps: np.ndarray, resumed: list[float]) -> str:
    """Returns what weakens a fall: that one evaluation carries it, or that training was resumed close by."""
    place = int(np.searchsorted(steps, onset))
    cautions = ""
    if place == steps.size - 1:
        cautions += " It rests on the final evaluation alone and cannot be told from one bad evaluation."
    low, high = steps[max(0, place - 2)], steps[min(steps.size - 1, place + 2)]
    near = [start for start in resumed if low <= start <= high]
    if near:
        cautions += f" Training was resumed at step {near[0]:g}, close by: a resume can look like a break."
    return cautions
