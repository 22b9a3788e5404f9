"""What the capture detector says, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gradscope.detectors.capture_scale import CAPTURE, LENGTH_UNIT, SHARE_UNIT, VIOLATION_UNIT
from gradscope.detectors.series import PolicySeries
from gradscope.detectors.wording import at_step, by_chance, percent, score, span, too_few
from gradscope.stats.grams import logit

if TYPE_CHECKING:
    from gradscope.detectors.capture import Capture

Parts = Mapping[str, float | str]

FALSE_ALARMS = {
    "capture": "0.5 % of simulated runs without capture are called so, 5 % of those whose replies drift",
    "dominance": "3 % of simulated runs in which no role grows are called so, 3 % of those with noisy steps",
    "possible": "0.8 % of simulated runs without capture are called so",
}
"""From `tests/benchmarks/false_alarms.py --runs 1000`; docs/detectors.md holds its tables."""
HEADS = {
    "capture": "Role '{role}' took over {subject}",
    "dominance": "Role '{role}' came to dominate {subject}",
    "possible": "Role '{role}' may have taken over {subject}",
}
HEAVY = 2.0 * SHARE_UNIT
"""Log odds above its rows from which a role was heavy from the start."""


def capture_sentence(capture: Capture, series: PolicySeries) -> str:
    """Returns what a colleague would say about one policy."""
    subject = f"policy '{series.policy}'"
    if capture.role is None:
        reason = too_few(series.role_gram()) or f"the log lacks {capture.parts['missing']}"
        return f"Role capture of {subject}: cannot be told, {reason}."
    role = series.role_names()[capture.role]
    if capture.verdict == "none":
        return _none(capture, role, subject)
    return _change(capture, role, subject, series.role_names())


def _none(capture: Capture, role: str, subject: str) -> str:
    return (
        f"Role capture of {subject}: none. The largest energy share at the end is that of '{role}', "
        f"{_share(capture.parts)}; score {score(capture.score)} (capture from {CAPTURE:g})."
        f"{_reservations(capture.parts)}{_imbalance(capture.parts)}"
    )


def _share(parts: Parts) -> str:
    first, last = (percent(float(parts[name])) for name in ("share_base", "share_final"))
    return f"from {first} to {last} {span(float(parts['window_steps']))}"


def _reservations(parts: Parts) -> str:
    """Returns why a share that rose enough is nothing to report; empty where it did not."""
    if not np.isfinite(float(parts["chance"])):
        return ""
    expected = float(parts["share_expected_final"])
    if float(parts["share_final"]) <= expected:
        return f" It rose, but its number of rows alone would give it {percent(expected)}, no less."
    return f" Its rise is no proof of a change: {by_chance(float(parts['chance']))}."


def _imbalance(parts: Parts) -> str:
    """Returns a caution where a role was heavy from the start: what happened earlier cannot be seen."""
    expected = float(parts["share_expected"])
    base, alone = logit(np.array([float(parts["share_base"]), expected]))
    if not base - alone > HEAVY:
        return ""
    return (
        f" It was imbalanced from the start: its number of rows alone would give it {percent(expected)}. A "
        "capture before the end of the first window would look like this."
    )


def _change(capture: Capture, role: str, subject: str, roles: list[str]) -> str:
    parts = capture.parts
    numbers = f"share {parts['share']:.2f}, alignment {parts['alignment']:.2f}, drift {parts['drift']:.2f}"
    ending = (
        "no other role's replies drifted enough to call it capture"
        if capture.verdict == "dominance"
        else f"meanwhile the replies of '{roles[int(parts['drift_role'])]}' drifted ({_drift(parts)})"
    )
    expected = float(parts["share_expected_final"])
    alone = f"; its rows alone would give it {percent(expected)}" if np.isfinite(expected) else ""
    head = HEADS[capture.verdict].format(role=role, subject=subject)
    order = by_chance(float(parts["chance"]))
    return (
        f"{head} from about {at_step(capture.step)}: its "
        f"share of gradient energy went {_share(parts)}{alone}, and the joint gradient turned towards it; "
        f"{ending}. Parts of the score: {numbers} (drift read from {parts['drift_from']}); "
        f"{order}. {FALSE_ALARMS[capture.verdict]}. The log shows that these went "
        "together, not what made what: a replay without that role's gradient tests it."
    )


def _drift(parts: Parts) -> str:
    words = []
    if float(parts["drift_length"]) > 0:
        times = np.exp(float(parts["drift_length"]) * LENGTH_UNIT)
        words.append(f"reply length changed {times:.2f}-fold more than its own")
    if float(parts["drift_violation"]) > 0:
        points = 100 * float(parts["drift_violation"]) * VIOLATION_UNIT
        words.append(f"format violations up by {points:.0f} points")
    return ", ".join(words)
