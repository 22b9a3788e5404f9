"""What the keys of one framework's logs mean: patterns that lead to the names of the run file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gradscope.errors import ConfigError

EVALUATION = ("num_correct", "num_total", "eval_accuracy", "temperature")
"""Metrics of an evaluation. `eval_accuracy` is a fraction, which becomes counts where the number is told."""


@dataclass(frozen=True)
class Meaning:
    """What one key stands for.

    Attributes:
        metric: Name in the run file's schema, or one of `EVALUATION`; empty for a key that nobody knows.
        labels: What else the key says: role, slot, slot_b, policy, phase, dataset, sampling, minibatch.
        rank: Of two keys with one meaning the one of lower rank counts.
    """

    metric: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0

    @property
    def role(self) -> str:
        """The role that the key names; empty where it names none."""
        return self.labels.get("role", "")

    @property
    def place(self) -> tuple[object, ...]:
        """What is equal for two keys with one meaning."""
        return (self.metric, *sorted(self.labels.items()))

    @property
    def is_evaluation(self) -> bool:
        """Whether it is part of an evaluation."""
        return self.metric in EVALUATION or "dataset" in self.labels


UNKNOWN = Meaning()


@dataclass(frozen=True)
class Trap:
    """A sentence to warn with where a key matches."""

    pattern: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Patterns and what to know about one framework's logs.

    Attributes:
        rules: Regular expressions for whole keys, with named groups as in `Meaning.labels`, to metrics; of
            two that lead to one meaning the first counts.
        traps: What may be misread.
        limits: What such a log cannot answer.
        window: What a value means where several optimizer steps lie between rows: `last` step's or `mean`.
        labels: Pattern to labels that hold for its keys without standing in them.
        roles: Roles in order, where known beforehand.
        policies: Role to policy, where known beforehand.
    """

    rules: Mapping[str, str]
    traps: tuple[Trap, ...] = ()
    limits: tuple[str, ...] = ()
    window: str = ""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    policies: Mapping[str, str] = field(default_factory=dict)

    def reader(self, role_pattern: str | None = None) -> Callable[[str], Meaning]:
        """Returns a function from key to meaning, which keeps what it has once found.

        Args:
            role_pattern: Regular expression with a group `role`; where it is found in a key, the key is
                looked up without the role, and if nobody knows that, without all that was found.

        Raises:
            ConfigError: The pattern is none, or has no such group.
        """
        compiled = [
            (re.compile(pattern), Meaning(metric, self.labels.get(pattern, {}), rank))
            for rank, (pattern, metric) in enumerate(self.rules.items())
        ]
        finder = None if role_pattern is None else _role_finder(role_pattern)
        known: dict[str, Meaning] = {}

        def read(key: str) -> Meaning:
            if key not in known:
                known[key] = _meaning(key, compiled, finder)
            return known[key]

        return read


def _role_finder(pattern: str) -> re.Pattern[str]:
    try:
        finder = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--role-pattern '{pattern}': no regular expression ({error}).") from error
    if "role" not in finder.groupindex:
        raise ConfigError(
            f"--role-pattern '{pattern}': has no group 'role'. Write it as in 'actor/(?P<role>[^/]+)/'."
        )
    return finder


def _meaning(
    key: str, rules: list[tuple[re.Pattern[str], Meaning]], finder: re.Pattern[str] | None
) -> Meaning:
    found = finder.search(key) if finder else None
    if found is None or not found["role"]:
        return _looked_up(key, rules)
    for start, end in (found.span("role"), found.span()):
        rest = re.sub(r"//+", "/", key[:start] + key[end:]).strip("/")
        meaning = _looked_up(rest, rules)
        if meaning.metric:
            return replace(meaning, labels={**meaning.labels, "role": found["role"]})
    return UNKNOWN


def _looked_up(key: str, rules: list[tuple[re.Pattern[str], Meaning]]) -> Meaning:
    for pattern, meaning in rules:
        match = pattern.fullmatch(key)
        if match:
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            return replace(meaning, labels={**meaning.labels, **groups})
    return UNKNOWN
