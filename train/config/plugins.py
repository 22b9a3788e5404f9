"""Checks a plug-in's options against its own keyword-only parameters, and builds the plug-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from gradscope.errors import ConfigError, nearest
from gradscope.train.config.sections import PluginSection, TaskSection, WorkflowSection
from gradscope.train.episode import Task, Workflow
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS

S = TypeVar("S", bound=PluginSection)


def check_options(kind: str, factory: Callable[..., Any], section: S) -> S:
    """Returns the section with its options converted to the types that the plug-in asks for.

    Options that are fields of the section itself, such as `workflow.style`, are left alone.

    Raises:
        ConfigError: An option is unknown, missing or of the wrong type.
    """
    parameters = plugin_parameters(factory)
    known = type(section).model_fields
    own = [name for name in parameters if name not in known]
    options = section.options
    for name in options:
        if name not in own:
            raise ConfigError(
                f"unknown key '{kind}.{name}'.{nearest(name, own)} "
                f"Options of {kind} '{section.name}': {', '.join(own) or 'none'}."
            )
    for name in own:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise ConfigError(
                f"{kind} '{section.name}' needs the option {kind}.{name}; add {kind}.{name}=VALUE."
            )
    converted = {name: _convert(kind, name, value, factory) for name, value in options.items()}
    return section.model_copy(update=converted) if converted else section


def plugin_parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the keyword-only parameters of a plug-in, in order."""
    signature = inspect.signature(factory)
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _convert(kind: str, name: str, value: Any, factory: Callable[..., Any]) -> Any:
    target = factory.__init__ if inspect.isclass(factory) else factory
    hint = get_type_hints(target).get(name, Any)
    if isinstance(value, bool) and hint in (int, float):
        raise ConfigError(f"{kind}.{name} is {value!r}: input should be a number, not true or false.")
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{kind}.{name} is {value!r}: {message[0].lower()}{message[1:]}.") from error


def build_workflow(section: WorkflowSection) -> Workflow:
    """Builds the workflow that a checked section names."""
    return WORKFLOWS.get(section.name)(style=section.style, **section.options)


def build_task(section: TaskSection) -> Task:
    """Builds the task that a checked section names; a task may read its data here.

    Raises:
        DataError: Its data cannot be read.
    """
    return TASKS.get(section.name)(**section.options)
