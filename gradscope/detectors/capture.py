"""Role capture: one role takes over a policy that several roles share, and the others' replies drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from gradscope import derive
from gradscope.detectors.finding import Finding, Skipped
from gradscope.detectors.series import PolicySeries, policy_series, role_means
from gradscope.detectors.wording import at_step, percent, score, too_few
from gradscope.errors import SchemaError
from gradscope.stats.grams import checked_grams, checked_steps, complete, logit
from gradscope.stats.steps import as_step
from gradscope.stats.windows import FEWEST_VALID, SHORTEST, Windows, onset, windows_for

Array = NDArray[np.float64]

SHARE_UNIT = 0.8
ALIGNMENT_UNIT = 0.25
LENGTH_UNIT = 0.3
VIOLATION_UNIT = 0.10
CAPTURE = 0.75
POSSIBLE = 0.5
DOMINANCE = 1.0
"""Units and thresholds; docs/detectors.md says where they were calibrated."""
SHORTEST_REPLY = 0.5
"""Tokens; a role that falls silent has a long way to go down in log length, not an infinite one."""
FALSE_ALARMS = "0.6 % of simulated runs without capture reach it, 5 % of those whose replies drift"
"""From `tests/benchmarks/false_alarms.py --runs 1000`; docs/detectors.md holds its tables."""


@dataclass(frozen=True)
class Capture:
    """Whether one role took over a shared policy, or how near the run came to it.

    Attributes:
        score: The weakest of the three parts share, alignment and drift, each in units of its threshold.
        verdict: `capture` from 0.75; else `dominance` where share and alignment both reach 1 without drift of
            another role; else `possible` from 0.5; else `none`. `undetermined` where a window holds fewer
            than five steps with values, the windows would overlap, or neither lengths nor violations are
            known.
        role: Index of the role with the largest share at the end; None where undetermined.
        index: Row at which its share left the first level; None where undetermined.
        step: `step[index]`; None where no steps were given or nothing is determined.
        parts: `share`, `alignment`, `drift` (the score is their smallest), what drift is made of
            (`drift_length`, `drift_violation`, of role index `drift_role`), the captor's median share in both
            windows (`share_base`, `share_final`), and `drift_from`: which records drift was read from. Where
            it is undetermined, `missing` says for want of what.
    """

    score: float
    verdict: str
    role: int | None
    index: int | None
    step: int | float | None
    parts: Mapping[str, float | str]


def find_capture(
    role_gram: ArrayLike, role_tokens: ArrayLike, role_violation: ArrayLike, *, step: ArrayLike | None = None
) -> Capture:
    """Returns whether one role's gradient took over a shared policy while another role's replies drifted.

    Compares the last fifth of the steps with the first fifth (at least ten steps each): the captor's energy
    share must rise (in log odds), it must align with the sum more than the others do, and another role must
    change its reply length more than the captor, or break its format more often. Its own baseline removes an
    imbalance that is there from the start.

    Args:
        role_gram: `[T, R, R]` products of the roles' gradients on the shared policy, R at least 2; NaN rows
            where there was no signal.
        role_tokens: `[T, R]` mean reply tokens, NaN where unknown.
        role_violation: `[T, R]` fraction of replies outside their format; all NaN where unknown.
        step: `[T]` increasing training steps.

    Raises:
        SchemaError: Shapes that do not fit, or numbers that cannot be.
    """
    grams = complete(checked_grams(role_gram, name="role_gram", least=2))
    tokens = _checked_replies(role_tokens, grams, name="role_tokens", largest=np.inf)
    violations = _checked_replies(role_violation, grams, name="role_violation", largest=1.0)
    steps = checked_steps(step, grams.shape[0])
    windows = windows_for(grams.shape[0])
    if windows is None:
        return _undetermined({}, f"{2 * SHORTEST} steps")
    shares = derive.diagonal_share(grams)
    base, final = windows.medians(shares)
    if not np.isfinite(base + final).all():
        return _undetermined({}, f"{FEWEST_VALID} steps with signal in both windows")
    captor = int(np.argmax(final))
    parts: dict[str, float | str] = {
        "share": float(logit(final)[captor] - logit(base)[captor]) / SHARE_UNIT,
        "alignment": _alignment_gain(grams, captor, windows) / ALIGNMENT_UNIT,
        **_drift(tokens, violations, captor, windows),
        "share_base": float(base[captor]),
        "share_final": float(final[captor]),
    }
    total = float(np.min([parts["share"], parts["alignment"], parts["drift"]]))
    if not np.isfinite(total):
        return _undetermined(parts, _missing(parts))
    row = onset(logit(shares[:, captor]), base=float(logit(base)[captor]), final=float(logit(final)[captor]))
    return Capture(
        score=total,
        verdict=_verdict(total, min(float(parts["share"]), float(parts["alignment"]))),
        role=captor,
        index=row,
        step=as_step(steps, row),
        parts=parts,
    )


def _undetermined(parts: Mapping[str, float | str], missing: str) -> Capture:
    return Capture(float("nan"), "undetermined", None, None, None, {**parts, "missing": missing})


def _missing(parts: Mapping[str, float | str]) -> str:
    """Returns what a part that is NaN would have needed."""
    if not np.isfinite(float(parts["alignment"])):
        return "products between the roles' gradients"
    return "reply lengths and format violations of five steps in both windows"


def _verdict(value: float, gradients: float) -> str:
    if value >= CAPTURE:
        return "capture"
    if gradients >= DOMINANCE:
        return "dominance"
    return "possible" if value >= POSSIBLE else "none"


def _checked_replies(values: ArrayLike, grams: Array, *, name: str, largest: float) -> Array:
    """Returns a per-role record of replies as `[T, R]`, NaN allowed."""
    array = np.asarray(values, dtype=np.float64)
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
        role_means(run, "violation_fraction", roles, series.steps),
        step=series.steps,
    )
    evidence = {"policy": series.policy, "score": capture.score, **capture.parts}
    evidence["share_expected"] = expected = _expected_share(run, series, capture)
    subject = f"policy '{series.policy}'"
    if capture.role is None:
        reason = too_few(series.role_gram()) or f"the log lacks {capture.parts['missing']}"
        sentence = f"Role capture of {subject}: cannot be told, {reason}."
        return Finding("capture", None, None, capture.verdict, evidence, sentence)
    role = roles[capture.role]
    first, last = (percent(float(capture.parts[name])) for name in ("share_base", "share_final"))
    share = f"from {first} to {last}"
    if capture.verdict == "none":
        sentence = (
            f"Role capture of {subject}: none. The largest energy share at the end is that of '{role}', "
            f"{share} from the first to the last fifth; score {score(capture.score)} (capture from "
            f"{CAPTURE:g}).{_imbalance(float(capture.parts['share_base']), expected)}"
        )
        return Finding("capture", None, None, capture.verdict, evidence, sentence)
    sentence = _change_sentence(capture, role, share, subject, roles)
    return Finding("capture", role, capture.step, capture.verdict, evidence, sentence)


def _expected_share(run: xr.DataTree, series: PolicySeries, capture: Capture) -> float:
    """Returns the captor's energy share in the first window if roles differed in their counts only."""
    windows = windows_for(series.steps.size)
    shares = derive.role_shares(run, series.policy)
    if capture.role is None or windows is None or "expected_energy" not in shares:
        return float("nan")
    own = shares["expected_energy"].sel(role=series.role_names()[capture.role])
    return float(windows.medians(own.values)[0])


def _imbalance(base: float, expected: float) -> str:
    """Returns a caution where a role was heavy from the start: what happened earlier cannot be seen."""
    shares = logit(np.array([base, expected]))
    if not shares[0] - shares[1] > 2.0 * SHARE_UNIT:
        return ""
    return (
        f" It was imbalanced from the start: its number of rows alone would give it {percent(expected)}. A "
        "capture before the first fifth would look like this."
    )


def _change_sentence(capture: Capture, role: str, share: str, subject: str, roles: list[str]) -> str:
    heads = {
        "capture": f"Role '{role}' took over {subject}",
        "dominance": f"Role '{role}' came to dominate {subject}",
        "possible": f"Role '{role}' may have taken over {subject}",
    }
    parts = capture.parts
    numbers = f"share {parts['share']:.2f}, alignment {parts['alignment']:.2f}, drift {parts['drift']:.2f}"
    ending = (
        "no other role's replies drifted enough to call it capture"
        if capture.verdict == "dominance"
        else f"meanwhile the replies of '{roles[int(parts['drift_role'])]}' drifted ({_drift_words(parts)})"
    )
    return (
        f"{heads[capture.verdict]} from about {at_step(capture.step)}: its share of gradient energy went "
        f"{share} from the first to the last fifth of the run and the joint gradient turned towards it; "
        f"{ending}. Score {score(capture.score)} (capture from {CAPTURE:g}; {FALSE_ALARMS}; {numbers}), "
        f"drift read from {parts['drift_from']}. The log shows that these went together, not what made what: "
        "a replay without that role's gradient tests it."
    )


def _drift_words(parts: Mapping[str, float | str]) -> str:
    words = []
    if float(parts["drift_length"]) > 0:
        words.append(
            f"reply length changed {np.exp(float(parts['drift_length']) * LENGTH_UNIT):.2f}-fold more than "
            "its own"
        )
    if float(parts["drift_violation"]) > 0:
        words.append(
            f"format violations up by {100 * float(parts['drift_violation']) * VIOLATION_UNIT:.0f} points"
        )
    return ", ".join(words)
