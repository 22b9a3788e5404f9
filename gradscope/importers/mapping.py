"""Mapping files: a dialect of the user's own, in YAML, for columns that have names of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradscope.errors import ConfigError, nearest, unknown_name
from gradscope.importers.dialect import Dialect, Meaning
from gradscope.importers.roster import Roster
from gradscope.importers.wording import listed
from gradscope.schema import TABLES, Variable

SECTIONS = ("step", "metrics", "patterns", "evaluation", "policies")
EVALUATION_COLUMNS = {
    "num_correct": "num_correct",
    "num_total": "num_total",
    "accuracy": "eval_accuracy",
    "temperature": "temperature",
}
DATASET = "dataset"


@dataclass(frozen=True)
class MappingFile:
    """What a mapping file says.

    Attributes:
        name: Of the file.
        step: Column of steps; None where the file leaves it to the importer.
        num_total: Answers of every evaluation; None where a column says it, or nobody does.
        columns: Column to where in the file it is named, such as `metrics.loss`.
        patterns: Its regular expressions.
        dialect: Columns and patterns to metrics.
    """

    name: str
    step: str | None
    num_total: int | None
    columns: Mapping[str, str]
    patterns: tuple[str, ...]
    dialect: Dialect

    def unused(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Returns what to say of patterns that fit none of the keys."""
        idle = [pattern for pattern in self.patterns if not any(re.fullmatch(pattern, key) for key in keys)]
        return (f"{len(idle)} pattern(s) of {self.name} fit no key ({listed(idle)}).",) if idle else ()

    def check_columns(self, names: Sequence[str], source: str) -> None:
        """Refuses a column that the source does not have.

        Raises:
            ConfigError: It names one.
        """
        for column, place in self.columns.items():
            if column not in names:
                raise ConfigError(
                    f"{self.name}: {place} names the column '{column}', which {source} does not have."
                    f"{nearest(column, names)} It has {listed(names, most=8, none='none')}."
                )

    def check_places(self, keys: Iterable[str], read: Callable[[str], Meaning], people: Roster) -> None:
        """Refuses what would silently go nowhere, or to one place twice.

        Raises:
            ConfigError: A role of `policies` has no column; it is open whose a column is; or two roles of one
                policy have a gradient norm each.
        """
        for role in self.dialect.policies:
            if role not in people.slots:
                raise ConfigError(
                    f"{self.name}: policies names the role '{role}', which no column is of."
                    f"{nearest(role, people.slots)} Roles: {', '.join(people.slots)}."
                )
        for key in keys:
            meaning = read(key)
            if meaning.metric and not meaning.is_evaluation and not people.has_place(meaning):
                raise ConfigError(
                    f"{self.name}: column '{key}' is {meaning.metric}, but of which of "
                    f"{listed(people.slots)} is open. Write role: column pairs, or put all on one policy."
                )


def read_mapping(path: str | Path) -> MappingFile:
    """Returns what a mapping file says.

    Its sections: `step` (a column), `metrics` (name in the run file to a column, or to role: column pairs),
    `patterns` (regular expression with a group `role` to a name), `evaluation` (num_correct, num_total,
    accuracy, temperature to columns, num_total also to a number; dataset to a name) and `policies` (role to
    policy).

    Raises:
        ConfigError: It is absent, no YAML, or says something else.
        UnknownNameError: A section or metric that does not exist.
    """
    content = _content(path)
    step = content.get("step")
    if step is not None and not isinstance(step, str):
        raise ConfigError(f"{path}: step is {step!r}, expected the name of a column.")
    named: list[tuple[str, str, str, dict[str, str]]] = []  # column, place, metric, labels
    for metric, role, column in _columns(path, _section(path, content, "metrics")):
        place = f"metrics.{metric}{f'.{role}' if role else ''}"
        named.append((column, place, metric, {"role": role} if role else {}))
    evaluation = _section(path, content, "evaluation")
    dataset = str(evaluation.pop(DATASET, "evaluation"))
    total = _total(path, evaluation)
    for name, column in _evaluation(path, evaluation):
        named.append((column, f"evaluation.{name}", EVALUATION_COLUMNS[name], {DATASET: dataset}))
    columns: dict[str, str] = {}
    for column, place, _, _ in named:
        if column in columns:
            raise ConfigError(
                f"{path}: column '{column}' is both {columns[column]} and {place}. Name it once."
            )
        columns[column] = place
    rules = {re.escape(column): metric for column, _, metric, _ in named}
    patterns = _patterns(path, _section(path, content, "patterns"))
    rules |= patterns
    if not rules:
        raise ConfigError(f"{path}: maps no column. Fill metrics, patterns or evaluation.")
    labels = {re.escape(column): own for column, _, _, own in named}
    roles = tuple(dict.fromkeys(own["role"] for own in labels.values() if "role" in own))
    policies = {str(role): str(name) for role, name in _section(path, content, "policies").items()}
    dialect = Dialect(rules=rules, labels=labels, roles=roles, policies=policies)
    return MappingFile(Path(path).name, step, total, columns, tuple(patterns), dialect)


def _total(path: str | Path, evaluation: dict[str, Any]) -> int | None:
    """Takes the number of answers out of the section, where it is a number and no column."""
    total = evaluation.get("num_total")
    if not isinstance(total, int | float):
        return None
    if isinstance(total, bool) or total != int(total) or total < 1:
        raise ConfigError(f"{path}: evaluation.num_total is {total}, expected a whole number above 0.")
    return int(evaluation.pop("num_total"))


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping.

        Raises:
            ConstructorError: A key stands twice.
        """
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _content(path: str | Path) -> dict[str, Any]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(content, dict) or not content:
        found = "nothing" if content is None else repr(content)[:60]
        raise ConfigError(f"{path}: holds {found}, expected sections ({', '.join(SECTIONS)}).")
    for section in content:
        if section not in SECTIONS:
            raise unknown_name("section", str(section), SECTIONS, where=str(path))
    return content


def _section(path: str | Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {name} is {value!r}, expected names and columns under it.")
    return dict(value)


def _columns(path: str | Path, section: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (metric, role or nothing, column)."""
    for metric, columns in section.items():
        variable = _check_metric(path, str(metric))
        if isinstance(columns, dict) and variable.dims == ("step",):
            raise ConfigError(
                f"{path}: metrics.{metric} has roles, but is one number a step. Name one column for it."
            )
        pairs = columns.items() if isinstance(columns, dict) else [("", columns)]
        for role, column in pairs:
            if not isinstance(column, str):
                raise ConfigError(
                    f"{path}: metrics.{metric} is {columns!r}, expected a column, or role: column pairs."
                )
            yield str(metric), str(role), column


def _patterns(path: str | Path, section: Mapping[str, Any]) -> dict[str, str]:
    for pattern, metric in section.items():
        _check_metric(path, str(metric))
        try:
            re.compile(str(pattern))
        except re.error as error:
            raise ConfigError(f"{path}: patterns: '{pattern}' is no regular expression ({error}).") from error
    return {str(pattern): str(metric) for pattern, metric in section.items()}


def _evaluation(path: str | Path, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (key of the section, column)."""
    for name, column in section.items():
        if name not in EVALUATION_COLUMNS:
            raise unknown_name(
                "key of evaluation", str(name), [DATASET, *EVALUATION_COLUMNS], where=str(path)
            )
        if not isinstance(column, str):
            raise ConfigError(f"{path}: evaluation.{name} is {column!r}, expected the name of a column.")
        yield name, column


def _check_metric(path: str | Path, metric: str) -> Variable:
    tables = [variable for table in ("updates", "train") for variable in TABLES[table].variables]
    known = {v.name: v for v in tables if v.dims in ((v.dims[0],), ("step", "slot")) and v.dtype != "str"}
    if metric not in known:
        raise unknown_name("metric", metric, known, where=str(path))
    return known[metric]
