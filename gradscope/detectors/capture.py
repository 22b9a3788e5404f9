"""Role capture: one role takes over a policy that several roles share, and the others' replies drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from gradscope import derive
from gradscope.detectors.capture_scale import (
    ALIGNMENT_UNIT,
    CAPTURE,
    DOMINANCE,
    LENGTH_UNIT,
    POSSIBLE,
    SHARE_UNIT,
    SURE_CAPTURE,
    SURE_DOMINANCE,
    SURE_POSSIBLE,
    VIOLATION_UNIT,
)
from gradscope.detectors.capture_words import capture_sentence
from gradscope.detectors.finding import Finding, Skipped
from gradscope.detectors.series import PolicySeries, policy_series, role_means, role_rows
from gradscope.errors import SchemaError
from gradscope.stats import permutation
from gradscope.stats.arrays import real_array
from gradscope.stats.grams import checked_grams, checked_steps, complete, logit
from gradscope.stats.steps import as_step
from gradscope.stats.windows import FEWEST_VALID, SHORTEST, Windows, onset, windows_for

Array = NDArray[np.float64]

SHORTEST_REPLY = 0.5
"""Tokens; a role that falls silent has a long way to go down in log length, not an infinite one."""


@dataclass(frozen=True)
class Capture:
    """Whether one role took over a shared policy, or how near the run came to it.

    Attributes:
        score: The weakest of the three parts share, alignment and drift, each in units of its threshold.
        verdict: `capture` from 0.75; else `dominance` where share and alignment both reach 1 without drift of
            another role; else `possible` from 0.5; else `none`. Each only where few random orders of the
            run's own steps change as much (2 %, 1 % and 5 % at most) and the final share exceeds what the
            role's rows alone give. `undetermined` where a window holds fewer than five steps with values, the
            windows would overlap, or neither lengths nor violations are known.
        role: Index of the role with the largest share at the end; None where undetermined.
        index: Row at which its share left the first level; None where undetermined.
        step: `step[index]`; None where no steps were given or nothing is determined.
        parts: `share`, `alignment`, `drift` (the score is their smallest), what drift is made of
            (`drift_length`, `drift_violation`, of role index `drift_role`), the captor's median share in both
            windows (`share_base`, `share_final`), what rows alone would give it there
            (`share_expected`, `share_expected_final`; NaN where unknown), `chance` (how often reordered steps
            change as much; NaN where share and alignment are too small to ask), `window_steps`, and
            `drift_from`: which records drift was read from. Where it is undetermined, `missing` says for
            want of what.
    """

    score: float
    verdict: str
    role: int | None
    index: int | None
    step: int | float | None
    parts: Mapping[str, float | str]


def find_capture(
    role_gram: ArrayLike,
    role_tokens: ArrayLike,
    role_violation: ArrayLike,
    *,
    step: ArrayLike | None = None,
    role_rows: ArrayLike | None = None,
) -> Capture:
    """Returns whether one role's gradient took over a shared policy while another role's replies drifted.

    Compares the last fifth of the steps with the first fifth (at least ten steps each): the captor's energy
    share must rise (in log odds), it must align with the sum more than the others do, and another role must
    change its reply length more than the captor, or break its format more often. Its own baseline removes an
    imbalance that is there from the start. The rise must be rare among random orders of the run's steps.

    Args:
        role_gram: `[T, R, R]` products of the roles' gradients on the shared policy, R at least 2; NaN rows
            where there was no signal.
        role_tokens: `[T, R]` mean reply tokens, NaN where unknown.
        role_violation: `[T, R]` fraction of replies outside their format; all NaN where unknown.
        step: `[T]` increasing training steps.
        role_rows: `[T, R]` rows with signal. Where given, a captor must end with more than their share.

    Raises:
        SchemaError: Shapes that do not fit, or numbers that cannot be.
    """
    grams = complete(checked_grams(role_gram, name="role_gram", least=2))
    tokens = _checked_replies(role_tokens, grams, name="role_tokens", largest=np.inf)
    violations = _checked_replies(role_violation, grams, name="role_violation", largest=1.0)
    unknown = np.full(grams.shape[:2], np.nan)
    rows = _checked_replies(
        unknown if role_rows is None else role_rows, grams, name="role_rows", largest=np.inf
    )
    steps = checked_steps(step, grams.shape[0])
    windows = windows_for(grams.shape[0])
    if windows is None:
        return _undetermined({}, f"{2 * SHORTEST} steps")
    shares = derive.diagonal_share(grams)
    base, final = windows.medians(shares)
    if not np.isfinite(base + final).all():
        return _undetermined({}, f"{FEWEST_VALID} steps with signal in both windows")
    captor = int(np.argmax(final))
    expected = windows.medians(derive.expected_energy_share(rows)[:, captor])
    parts: dict[str, float | str] = {
        "share": float(logit(final)[captor] - logit(base)[captor]) / SHARE_UNIT,
        "alignment": _alignment_gain(grams, captor, windows) / ALIGNMENT_UNIT,
        **_drift(tokens, violations, captor, windows),
        "share_base": float(base[captor]),
        "share_final": float(final[captor]),
        "share_expected": float(expected[0]),
        "share_expected_final": float(expected[1]),
        "chance": float("nan"),
        "window_steps": windows.width,
    }
    total = float(np.min([parts["share"], parts["alignment"], parts["drift"]]))
    if not np.isfinite(total):
        return _undetermined(parts, _missing(parts))
    if min(float(parts["share"]), float(parts["alignment"])) >= POSSIBLE:
        parts["chance"] = _chance(grams, windows)
    row = onset(logit(shares[:, captor]), base=float(logit(base)[captor]), final=float(logit(final)[captor]))
    return Capture(total, _verdict(total, parts), captor, row, as_step(steps, row), parts)


def _undetermined(parts: Mapping[str, float | str], missing: str) -> Capture:
    return Capture(float("nan"), "undetermined", None, None, None, {**parts, "missing": missing})


def _missing(parts: Mapping[str, float | str]) -> str:
    """Returns what a part that is NaN would have needed."""
    if not np.isfinite(float(parts["alignment"])):
        return "products between the roles' gradients"
    return "reply lengths and format violations of five steps in both windows"


def _verdict(total: float, parts: Mapping[str, float | str]) -> str:
    gradients = min(float(parts["share"]), float(parts["alignment"]))
    chance = float(parts["chance"])  # NaN, which is below nothing, where the gradients changed too little
    if float(parts["share_final"]) <= float(parts["share_expected_final"]):
        return "none"
    if total >= CAPTURE and chance <= SURE_CAPTURE:
        return "capture"
    if gradients >= DOMINANCE and chance <= SURE_DOMINANCE:
        return "dominance"
    return "possible" if total >= POSSIBLE and chance <= SURE_POSSIBLE else "none"


def _chance(grams: Array, windows: Windows) -> float:
    """Returns how often the steps in random order show some role rise as much in share and alignment."""
    alignments = derive.alignments(grams)
    others = (alignments.sum(axis=1, keepdims=True) - alignments) / (alignments.shape[1] - 1)
    series = np.concatenate([logit(derive.diagonal_share(grams)), alignments - others], axis=1)
    usable = np.isfinite(series).all(axis=1)
    return permutation.chance(series[usable].T, _takeover, *windows.num_usable(usable))


def _takeover(base: Array, final: Array) -> Array:
    """Returns the weaker contrast, of share and of alignment, of the role with the largest final share.

    Args:
        base: `[..., 2R, B]`, log odds of the roles' shares, then their alignments above the others'.
        final: `[..., 2R, F]`, the same.
    """
    num_roles = base.shape[-2] // 2
    captor = np.argmax(np.median(final[..., :num_roles, :], axis=-1), axis=-1)[..., None, None]
    own = np.concatenate([captor, captor + num_roles], axis=-2)
    pair = (np.take_along_axis(part, own, axis=-2) for part in (base, final))
    return permutation.contrast(*pair).min(axis=-1)


def _checked_replies(values: ArrayLike, grams: Array, *, name: str, largest: float) -> Array:
    """Returns a per-role record of replies as `[T, R]`, NaN allowed."""
    array = real_array(values, name=name)
    if array.shape != grams.shape[:2]:
        raise SchemaError(
            f"{name} has shape {array.shape}, role_gram {grams.shape}: expected {grams.shape[:2]}, [T, R]."
        )
    if ((array < 0) | (array > largest)).any():
        row, role = np.argwhere((array < 0) | (array > largest))[0]
        raise SchemaError(
            f"{name}[{row}, {role}] = {array[row, role]:g} is not between 0 and {largest:g}; use NaN for "
            "missing."
        )
    return array


def _alignment_gain(grams: Array, captor: int, windows: Windows) -> float:
    """Returns the rise of the captor's alignment with the sum above the mean of the others'."""
    base, final = windows.medians(derive.alignments(grams))
    rise = final - base
    others = np.delete(rise, captor)
    known = others[np.isfinite(others)]
    return float(rise[captor] - known.mean()) if known.size else float("nan")


def _drift(tokens: Array, violations: Array, captor: int, windows: Windows) -> dict[str, float | str]:
    """Returns the largest drift of a role other than the captor, and which role and record show it."""
    base, final = windows.medians(np.log(np.maximum(tokens, SHORTEST_REPLY)))
    moved = np.abs(final - base)
    own = moved[captor] if np.isfinite(moved[captor]) else 0.0
    base_violation, final_violation = windows.means(violations)
    drift_LR = np.stack([(moved - own) / LENGTH_UNIT, (final_violation - base_violation) / VIOLATION_UNIT])
    drift_LR[:, captor] = np.nan
    lengths, formats = np.isfinite(drift_LR).any(axis=1)
    if not (lengths or formats):
        return {"drift": float("nan")}
    role = int(np.argmax(np.where(np.isfinite(drift_LR), drift_LR, -np.inf).max(axis=0)))
    sources = {
        (True, True): "reply lengths and format violations",
        (True, False): "reply lengths only",
        (False, True): "format violations only",
    }
    return {
        "drift": float(np.nanmax(drift_LR)),
        "drift_length": float(drift_LR[0, role]),
        "drift_violation": float(drift_LR[1, role]),
        "drift_role": role,
        "drift_from": sources[bool(lengths), bool(formats)],
    }


def detect(run: xr.DataTree) -> list[Finding]:
    """Looks for a role that took over a policy which it shares with other roles.

    Raises:
        Skipped: The run holds no Grams, or no policy is shared by several roles.
    """
    shared = [series for series in policy_series(run) if len(series.role_names()) > 1]
    if not shared:
        raise Skipped("no policy is shared by two roles, so none can be captured")
    return [_finding(run, series) for series in shared]


def _finding(run: xr.DataTree, series: PolicySeries) -> Finding:
    roles = series.role_names()
    capture = find_capture(
        series.role_gram(),
        role_means(run, "response_tokens_mean", roles, series.steps),
        role_means(run, "violation_fraction", roles, series.steps, largest=1.0),
        step=series.steps,
        role_rows=role_rows(run, series),
    )
    evidence = {
        "policy": series.policy,
        "verdict": capture.verdict,
        "score": capture.score,
        **capture.parts,
    }
    sentence = capture_sentence(capture, series)
    if capture.role is None or capture.verdict == "none":
        return Finding("capture", None, None, capture.verdict, evidence, sentence)
    return Finding("capture", roles[capture.role], capture.step, capture.verdict, evidence, sentence)
