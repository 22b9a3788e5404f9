"""Gradient amplification: copies of one role come to push the same way, and harder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from gradscope import derive
from gradscope.detectors.finding import Finding, Skipped
from gradscope.detectors.series import PolicySeries, policy_series
from gradscope.detectors.wording import at_step, by_chance, score, span, too_few
from gradscope.stats import permutation
from gradscope.stats.grams import checked_grams, checked_steps
from gradscope.stats.steps import as_step
from gradscope.stats.windows import onset, windows_for

Array = NDArray[np.float64]

COHERENCE_UNIT = 0.2
SIZE_UNIT = 0.3
FOUND = 1.0
POSSIBLE = 0.4
"""Units and thresholds; docs/detectors.md says where they were calibrated."""
SURE = 0.01
SURE_POSSIBLE = 0.05
"""How often at most reordered steps may change as much."""
FALSE_ALARMS = {
    "amplification": "0.3 % of simulated runs without it are called so",
    "possible": "4 % of simulated runs without it are called so",
}
"""From `tests/benchmarks/false_alarms.py --runs 1000`; docs/detectors.md holds its tables."""


@dataclass(frozen=True)
class Amplification:
    """Whether a role's copies came to amplify its gradient, or how near the run came to it.

    Attributes:
        score: The weaker of the parts `coherence` and `size`.
        verdict: `amplification` from 1, `possible` from 0.4, else `none`; each only where few random orders
            of the run's own steps change as much (1 % and 5 % at most). `undetermined` where a window holds
            fewer than five steps with values, or the windows would overlap.
        index: Row at which both had begun to rise; None where undetermined.
        step: `step[index]`; None where no steps were given or nothing is determined.
        parts: `coherence` (rise in units of 0.2) and `size` (rise of the log norm in units of 0.3), and the
            medians of the first and last window: `coherence_base`, `coherence_final`, `growth` (ratio of
            norms), `chance` (how often reordered steps change as much; NaN below 0.4, where nobody asks) and
            `window_steps`.
    """

    score: float
    verdict: str
    index: int | None
    step: int | float | None
    parts: Mapping[str, float]


def find_amplification(slot_gram: ArrayLike, *, step: ArrayLike | None = None) -> Amplification:
    """Returns whether the copies of one role became both more coherent and larger in gradient.

    Compares medians over the last fifth of the steps with those over the first fifth (at least ten steps
    each). Coherence is kappa = sum_{i!=j} G_ij / sum_{i!=j} n_i n_j, size half the log of the mean squared
    norm. With one adapter per slot nothing adds the copies' gradients: there a rise is a symptom, not a
    mechanism.

    Args:
        slot_gram: `[T, N, N]` products of the gradients of one role's N slots, N at least 2; NaN where a slot
            has no rows or there was no signal.
        step: `[T]` increasing training steps.

    Raises:
        SchemaError: Shapes that do not fit, or numbers that cannot be.
    """
    grams = checked_grams(slot_gram, name="slot_gram", least=2)
    steps = checked_steps(step, grams.shape[0])
    kappa, size = derive.coherence(grams), derive.log_size(grams)
    windows = windows_for(grams.shape[0])
    if windows is None:
        return _undetermined({})
    kappa_base, kappa_final = (float(value) for value in windows.medians(kappa))
    size_base, size_final = (float(value) for value in windows.medians(size))
    parts = {
        "coherence": (kappa_final - kappa_base) / COHERENCE_UNIT,
        "size": (size_final - size_base) / SIZE_UNIT,
        "coherence_base": kappa_base,
        "coherence_final": kappa_final,
        "growth": float(np.exp(size_final - size_base)),
        "chance": float("nan"),
        "window_steps": windows.width,
    }
    total = float(np.min([parts["coherence"], parts["size"]]))
    if not np.isfinite(total):
        return _undetermined(parts)
    rise = np.minimum((kappa - kappa_base) / COHERENCE_UNIT, (size - size_base) / SIZE_UNIT)
    row = onset(rise, base=float(np.nanmedian(rise[windows.base])), final=total)
    if total >= POSSIBLE:
        series = np.stack([kappa, size], axis=1)
        usable = np.asarray(np.isfinite(series).all(axis=1))
        parts["chance"] = permutation.chance(series[usable].T, _rise, *windows.num_usable(usable))
    return Amplification(total, _verdict(total, parts["chance"]), row, as_step(steps, row), parts)


def _rise(base: Array, final: Array) -> Array:
    """Returns the weaker contrast of coherence and size, `[..., 2, B]` and `[..., 2, F]` to `[...]`."""
    return permutation.contrast(base, final).min(axis=-1)


def _verdict(total: float, chance: float) -> str:
    if total >= FOUND and chance <= SURE:
        return "amplification"
    return "possible" if total >= POSSIBLE and chance <= SURE_POSSIBLE else "none"


def _undetermined(parts: Mapping[str, float]) -> Amplification:
    return Amplification(float("nan"), "undetermined", None, None, parts)


def detect(run: xr.DataTree) -> list[Finding]:
    """Looks for copies of one role, on one policy, that come to push the same way and harder.

    Raises:
        Skipped: The run holds no Grams, or no role has two slots on one policy.
    """
    pairs = [
        (series, role)
        for series in policy_series(run)
        for role in series.role_names()
        if len(series.slots_of(role)) > 1
    ]
    if not pairs:
        raise Skipped("no role has two slots that train one policy, so there are no copies to compare")
    return [_finding(series, role) for series, role in pairs]


def _finding(series: PolicySeries, role: str) -> Finding:
    gram = series.slot_gram(role)
    result = find_amplification(gram, step=series.steps)
    evidence = {"policy": series.policy, "num_copies": gram.shape[1], "score": result.score, **result.parts}
    subject = f"the {gram.shape[1]} copies of role '{role}'"
    if result.verdict == "undetermined":
        reason = too_few(gram) or "too few steps have two copies with signal"
        sentence = f"Gradient amplification by {subject}: cannot be told, {reason}."
        return Finding("amplification", role, None, result.verdict, evidence, sentence)
    parts = result.parts
    numbers = (
        f"coherence went from {parts['coherence_base']:.2f} to {parts['coherence_final']:.2f} and the "
        f"gradient's size {parts['growth']:.2f}-fold {span(parts['window_steps'])}; score "
        f"{score(result.score)} (amplification from {FOUND:g})"
    )
    order = f"; {by_chance(parts['chance'])}" if np.isfinite(parts["chance"]) else ""
    if result.verdict == "none":
        sentence = f"Gradient amplification by {subject}: none; {numbers}{order}."
        return Finding("amplification", role, None, result.verdict, evidence, sentence)
    verb = "amplify" if result.verdict == "amplification" else "may amplify"
    sentence = (
        f"From about {at_step(result.step)} {subject} {verb} its gradient: {numbers}{order}. "
        f"{FALSE_ALARMS[result.verdict]}. Copies with the same prompt and reward have equal mean gradients "
        "by construction, so a rise may be a rise of signal over noise; the log shows that it happened, not "
        "that it did harm."
    )
    return Finding("amplification", role, result.step, result.verdict, evidence, sentence)
