"""Alarms of a run that grows: the online warner, fed with each new step once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradscope import derive
from gradscope.detectors.series import PolicySeries
from gradscope.warner import Warner

SHOWN = 4
"""Alarms that are told, the latest."""


@dataclass(frozen=True)
class Alarm:
    """Something whose gradient has left its recent regime, in size and in direction.

    Attributes:
        subject: Whose gradient.
        step: Step at which it began.
        last_step: Step at which it stood last; None while it stands.
    """

    subject: str
    step: int
    last_step: int | None = None


@dataclass(frozen=True)
class Group:
    """Gradients whose agreement is watched: a role's copies, or the roles of one policy.

    Attributes:
        subject: Whose they are, in words.
        steps: Training steps, `[T]`.
        log_size: Half the log of the mean squared norm, `[T]`.
        coherence: kappa, `[T]`.
    """

    subject: str
    steps: np.ndarray
    log_size: np.ndarray
    coherence: np.ndarray


def groups(every: Sequence[PolicySeries]) -> list[Group]:
    """Returns what can be watched in the gradients of a run's policies."""
    found = []
    for series in every:
        roles = series.role_names()
        for role in roles:
            if len(series.slots_of(role)) > 1:
                subject = f"copies of {role_on(series, role, every)}"
                found.append(_group(subject, series, series.slot_gram(role)))
        if len(roles) > 1:
            found.append(_group(f"roles on {series.policy}", series, series.role_gram()))
    return found


def role_on(series: PolicySeries, role: str, every: Sequence[PolicySeries]) -> str:
    """Returns what to call a role of one policy: with the policy where the role trains several."""
    several = sum(role in other.roles for other in every) > 1
    return f"{role} on {series.policy}" if several else role


def _group(subject: str, series: PolicySeries, gram: np.ndarray) -> Group:
    return Group(subject, series.steps, derive.log_size(gram), derive.coherence(gram))


class Alarms:
    """Keeps one warner a group, and knows which steps it has seen.

    A resume takes steps back that were seen, so all is begun anew then.
    """

    def __init__(self) -> None:
        self._begin(segment=-1)

    def _begin(self, *, segment: int) -> None:
        self._warners: dict[str, Warner] = {}
        self._alarms: list[Alarm] = []
        self._before: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        self._segment = segment

    def update(self, found: list[Group], *, segment: int) -> list[Alarm]:
        """Takes the steps that are new and returns the latest alarms, those that ended included.

        Args:
            found: As `groups` returns them.
            segment: Number of the run's last segment.
        """
        if segment != self._segment:
            self._begin(segment=segment)
        for group in found:
            self._feed(group)
        return self._alarms[-SHOWN:]

    def _feed(self, group: Group) -> None:
        warner = self._warners.setdefault(group.subject, Warner())
        seen = self._seen.get(group.subject, -np.inf)
        for step, size, kappa in zip(group.steps, group.log_size, group.coherence, strict=True):
            if step <= seen:
                continue
            if np.isfinite(size) and np.isfinite(kappa):
                self._note(group.subject, int(step), changed=warner.update(float(size), float(kappa)))
        if group.steps.size:
            self._seen[group.subject] = float(group.steps[-1])

    def _note(self, subject: str, step: int, *, changed: bool) -> None:
        """Begins an alarm, or ends the one that stands, at a usable step."""
        place = next(
            (
                place
                for place, alarm in enumerate(self._alarms)
                if alarm.subject == subject and alarm.last_step is None
            ),
            None,
        )
        if place is None and changed:
            self._alarms.append(Alarm(subject, step))
        elif place is not None and not changed:
            self._alarms[place] = replace(self._alarms[place], last_step=self._before[subject])
        self._before[subject] = step
