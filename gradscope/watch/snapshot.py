"""What a glance at a run needs: the latest numbers and the way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from gradscope import derive
from gradscope.derive import wilson_interval
from gradscope.detectors.finding import Skipped
from gradscope.detectors.series import PolicySeries, policy_series, table
from gradscope.schema import DAMAGE
from gradscope.stats.evaluations import evaluation_series
from gradscope.watch.alarms import Alarm, Alarms, groups, role_on

Array = NDArray[np.float64]

RECENT = 20
"""Steps over which shares are pooled."""
EVENTS = 4
QUIET_EVENTS = ("checkpoint", "coverage")
"""Kinds of event that come all the time."""


@dataclass(frozen=True)
class Accuracy:
    """The evaluations of one setting.

    Attributes:
        setting: Data set and sampling.
        values: Accuracy by evaluation, `[E]`.
        step: Step of the last one.
        num_correct: Right answers in it.
        num_total: Answers in it.
        interval: 95 % Wilson interval of it.
    """

    setting: str
    values: Array
    step: int
    num_correct: int
    num_total: int
    interval: tuple[float, float]


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        name: What the run is called.
        step: Last training step; None before the first.
        state: `going on or cut off`, or when it was closed.
        segment: Number of its last segment.
        reward: Mean episode reward by step, `[T]`.
        accuracies: One each setting.
        norms: Role (and policy, where a role trains several) to its gradient's norm by step, `[T]`.
        shares: Policy to its roles' energy shares, pooled over the last 20 steps.
        coherences: Whose gradients (with the policy, as above) to kappa by step, `[T]`.
        alarms: What the warner says.
        events: Step, kind and message of the last ones worth mention.
        damage: What cannot be read; empty where all can.
    """

    name: str
    step: int | None
    state: str
    segment: int
    reward: Array
    accuracies: tuple[Accuracy, ...]
    norms: Mapping[str, Array]
    shares: Mapping[str, Mapping[str, float]]
    coherences: Mapping[str, Array]
    alarms: tuple[Alarm, ...]
    events: tuple[tuple[int, str, str], ...]
    damage: str


def take(run: xr.DataTree, alarms: Alarms) -> Snapshot:
    """Returns what a run holds now; the alarms take the steps that are new to them."""
    train = table(run, "train")
    steps = train["step"].values if "step" in train.coords else np.array([])
    segment = int(train["segment"].values[-1]) if "segment" in train and steps.size else 0
    every = _policies(run)
    watched = groups(every)
    finished = run.attrs.get("finished_at")
    norms, shares = _gradients(every)
    return Snapshot(
        name=str(run.name or run.attrs.get("run_id", "run")),
        step=int(steps[-1]) if steps.size else None,
        state=f"closed at {finished}" if finished else "going on or cut off",
        segment=segment,
        reward=_series(train, "episode_reward_mean"),
        accuracies=_accuracies(run),
        norms=norms,
        shares=shares,
        coherences={group.subject: group.coherence for group in watched},
        alarms=tuple(alarms.update(watched, segment=segment)),
        events=_events(run),
        damage=str(run.attrs.get(DAMAGE, "")),
    )


def _series(dataset: xr.Dataset, name: str) -> Array:
    return dataset[name].values.astype(np.float64) if name in dataset else np.array([])


def _policies(run: xr.DataTree) -> list[PolicySeries]:
    """Returns the gradients of every policy; nothing where the run holds no products."""
    try:
        return policy_series(run)
    except Skipped:
        return []


def _gradients(every: Sequence[PolicySeries]) -> tuple[dict[str, Array], dict[str, dict[str, float]]]:
    """Returns norms by role and shares by policy."""
    norms: dict[str, Array] = {}
    shares: dict[str, dict[str, float]] = {}
    for series in every:
        gram = series.role_gram()
        roles = series.role_names()
        for role, own in zip(roles, derive.norms(gram).T, strict=True):
            norms[role_on(series, role, every)] = own
        if len(roles) > 1:
            pooled = derive.diagonal_share(derive.pooled(gram[-RECENT:]))
            shares[series.policy] = dict(zip(roles, pooled.tolist(), strict=True))
    return norms, shares


def _accuracies(run: xr.DataTree) -> tuple[Accuracy, ...]:
    found = []
    for setting, series in evaluation_series(run).items():
        low, high = wilson_interval(series.correct[-1], series.total[-1])
        found.append(
            Accuracy(
                str(setting),
                series.accuracy,
                int(series.step[-1]),
                int(series.correct[-1]),
                int(series.total[-1]),
                (float(low), float(high)),
            )
        )
    return tuple(found)


def _events(run: xr.DataTree) -> tuple[tuple[int, str, str], ...]:
    events = table(run, "events")
    if "kind" not in events:
        return ()
    rows = zip(events["step"].values, events["kind"].values, events["message"].values, strict=True)
    told = [(int(step), str(kind), str(text)) for step, kind, text in rows if kind not in QUIET_EVENTS]
    return tuple(told[-EVENTS:])
