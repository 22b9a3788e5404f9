"""Builds a checked configuration from layers of mappings and dotted overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gradscope.errors import ConfigError, nearest
from gradscope.train.config.checks import check_config
from gradscope.train.config.plugins import check_options
from gradscope.train.config.presets import load_yaml, resolve_layers
from gradscope.train.config.sections import PLUGIN_SECTIONS, Config, section_model
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a preset, cell or YAML file, lays `key=value` overrides over it and checks the result.

    Values are read as YAML, so `policy.routing={generator: a, aggregator: b}` works. Options of the chosen
    workflow and task are checked against the plug-in; nothing is downloaded and no model is loaded.

    Raises:
        ConfigError: A key, value or combination cannot be used; one line says what to change.
        UnknownNameError: An unknown preset, workflow, task or role.
    """
    merged: dict[str, Any] = {}
    for layer in resolve_layers(source):
        merged = _merge(merged, layer)
    for override in overrides:
        merged = _merge(merged, _override_layer(override))
    where = str(source) if str(source).endswith((".yaml", ".yml")) else f"preset '{source}'"
    return config_from_mapping(merged, where=where)


def config_from_mapping(content: Mapping[str, Any], *, where: str = "configuration") -> Config:
    """Builds and checks a configuration from nested sections.

    Raises:
        ConfigError: As `load_config`.
    """
    _refuse_unknown_keys(content, where)
    try:
        config = Config.model_validate(_plain(content))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error)}") from error
    workflow = check_options("workflow", WORKFLOWS.get(config.workflow.name), config.workflow)
    task = check_options("task", TASKS.get(config.task.name), config.task)
    config = config.model_copy(update={"workflow": workflow, "task": task})
    check_config(config)
    return config


def to_yaml(config: Config) -> str:
    """Returns the configuration as a YAML file that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe_keys() -> dict[str, str]:
    """Returns every dotted key with its help, without the plug-ins' own options."""
    return {
        f"{section}.{key}": field.description or ""
        for section in Config.model_fields
        for key, field in section_model(section).model_fields.items()
    }


def _override_layer(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or key.count(".") != 1 or not all(key.split(".")):
        raise ConfigError(f"override '{override}': expected section.key=value, such as train.steps=100.")
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override '{override}': the value is not valid YAML. Put it in quotes.") from error
    section, _, name = key.partition(".")
    return {section: {name: value}}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lays sections over sections; a plug-in of another name drops the options of the one below."""
    merged = dict(below)
    for section, value in above.items():
        old = merged.get(section)
        if not isinstance(value, Mapping) or not isinstance(old, Mapping):
            merged[section] = value
            continue
        kept = dict(old)
        other_plugin = value.get("name", old.get("name")) != old.get("name")
        if section in PLUGIN_SECTIONS and other_plugin:
            kept = {key: item for key, item in old.items() if key in section_model(section).model_fields}
        merged[section] = {**kept, **value}
    return merged


def _refuse_unknown_keys(content: Mapping[str, Any], where: str) -> None:
    sections = Config.model_fields
    for section, value in content.items():
        if section not in sections:
            raise ConfigError(
                f"{where}: unknown section '{section}'.{nearest(section, sections)} "
                f"Allowed: {', '.join(sections)}."
            )
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: section '{section}' is {value!r}, expected keys and values under it."
            )
        model = section_model(section)
        for key in value if section not in PLUGIN_SECTIONS else ():
            if key not in model.model_fields:
                raise ConfigError(f"{where}: {_unknown_key(section, str(key), list(model.model_fields))}")


def _unknown_key(section: str, key: str, allowed: list[str]) -> str:
    keys = list(describe_keys())
    same_name = [full for full in keys if full.partition(".")[2] == key]
    # `lr` for learning_rate is the likeliest slip, and no edit distance finds it.
    initials = [name for name in allowed if key == "".join(word[0] for word in name.split("_"))]
    found = [*same_name, *(f"{section}.{name}" for name in initials)]
    hint = f" Did you mean '{found[0]}'?" if found else nearest(f"{section}.{key}", keys)
    return f"unknown key '{section}.{key}'.{hint} Allowed in {section}: {', '.join(allowed)}."


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    # Members of a union appear in the location after the key; the key itself is what the user wrote.
    place = ".".join(str(part) for part in problem["loc"][:2])
    found = problem["msg"].removeprefix("Value error, ")
    help_text = describe_keys().get(place, "")
    allowed = f" It means: {help_text}" if help_text else ""
    return f"{place} is {problem['input']!r}: {found[0].lower()}{found[1:]}.{allowed}"


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    return {section: dict(value) for section, value in content.items()}
