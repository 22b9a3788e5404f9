"""Mapping files: a dialect of the user's own, in YAML, for columns that have names of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gradscope.errors import ConfigError, unknown_name
from gradscope.importers.dialect import Dialect
from gradscope.schema import TABLES

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
        step: Column of steps; None where the file leaves it to the importer.
        num_total: Answers of every evaluation; None where a column says it, or nobody does.
        dialect: Columns and patterns to metrics.
    """

    step: str | None
    num_total: int | None
    dialect: Dialect


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
    rules: dict[str, str] = {}
    labels: dict[str, dict[str, str]] = {}
    for metric, role, column in _columns(path, _section(path, content, "metrics")):
        rules[re.escape(column)] = metric
        labels[re.escape(column)] = {"role": role} if role else {}
    rules |= _patterns(path, _section(path, content, "patterns"))
    evaluation = _section(path, content, "evaluation")
    dataset = str(evaluation.pop(DATASET, "evaluation"))
    total = evaluation.pop("num_total") if isinstance(evaluation.get("num_total"), int) else None
    for metric, column in _evaluation(path, evaluation):
        rules[re.escape(column)] = metric
        labels[re.escape(column)] = {DATASET: dataset}
    if not rules:
        raise ConfigError(f"{path}: maps no column. Fill metrics, patterns or evaluation.")
    roles = tuple(dict.fromkeys(own["role"] for own in labels.values() if "role" in own))
    policies = {str(role): str(name) for role, name in _section(path, content, "policies").items()}
    return MappingFile(step, total, Dialect(rules=rules, labels=labels, roles=roles, policies=policies))


def _content(path: str | Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
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
        _check_metric(path, str(metric))
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
    """Yields (metric, column)."""
    for name, column in section.items():
        if name not in EVALUATION_COLUMNS:
            raise unknown_name(
                "key of evaluation", str(name), [DATASET, *EVALUATION_COLUMNS], where=str(path)
            )
        if not isinstance(column, str):
            raise ConfigError(f"{path}: evaluation.{name} is {column!r}, expected the name of a column.")
        yield EVALUATION_COLUMNS[name], column


def _check_metric(path: str | Path, metric: str) -> None:
    tables = [variable for table in ("train", "updates") for variable in TABLES[table].variables]
    names = [v.name for v in tables if v.dims in ((v.dims[0],), ("step", "slot")) and v.dtype != "str"]
    if metric not in names:
        raise unknown_name("metric", metric, dict.fromkeys(names), where=str(path))
