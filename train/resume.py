"""What a run that goes on must keep, and the checkpoint that it goes on from."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from gradscope.errors import ConfigError, GradscopeError, RunFileError
from gradscope.runfile import open_run
from gradscope.train.checkpoint import FOLDER, State, checkpoint_steps, find_checkpoint, load_checkpoint
from gradscope.train.config import Config, load_config
from gradscope.train.config.plugins import plugin_parameters
from gradscope.train.directory import CONFIG_FILE
from gradscope.train.policy import Policies
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS

FIXED_SECTIONS = ("workflow", "task", "policy")
FIXED_KEYS = ("model.path", "train.seed", "rollout.num_problems", "algorithm.reward", "algorithm.group_by")
"""What makes a run the run it is; everything else may change on the way and is written down."""
DAMAGED = "damaged_"


@dataclass(frozen=True)
class Before:
    """What is known of a run that is to go on.

    Attributes:
        last_step: Its last recorded training step, 0 when there is none.
        evaluated_at_start: Whether it holds an evaluation of the untrained policies.
    """

    last_step: int
    evaluated_at_start: bool


def read_before(folder: Path, config: Config) -> Before:
    """Returns what is known of the run in a folder.

    Raises:
        ConfigError: The configuration makes another run of it.
        RunFileError: Its run file cannot be read, or the run has steps and no checkpoint.
    """
    with warnings.catch_warnings():
        # The writer writes down what is damaged when it opens the run.
        warnings.simplefilter("ignore", UserWarning)
        opened = open_run(folder)
    _refuse_another_run(folder, opened, config)
    last_step = max(_steps(opened, "train"), default=0)
    if last_step and not checkpoint_steps(folder):
        raise RunFileError(
            f"{folder}: the run has {last_step} steps but no checkpoint in {FOLDER}/ to go on from. "
            "Put its checkpoints back, or start a new run in another folder."
        )
    return Before(last_step, 0 in _steps(opened, "eval"))


def _steps(opened: xr.DataTree, group: str) -> list[int]:
    return (
        [int(step) for step in opened[group].to_dataset()["step"].values] if group in opened.children else []
    )


def _refuse_another_run(folder: Path, opened: xr.DataTree, config: Config) -> None:
    """Compares with what the run file says, which unlike `config.yaml` nobody edits.

    Raises:
        ConfigError: Something differs that makes another run.
    """
    before = json.loads(opened.attrs["config_json"]) or _described(folder)
    if not before:
        return
    old, new = _identity(before), _identity(config.model_dump(mode="json"))
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            raise ConfigError(
                f"{key} is {new.get(key)!r}, but the run in {folder} has {old.get(key)!r}: that is another "
                f"run. Take it back (gradscope train {folder / CONFIG_FILE} --out {folder} --resume), "
                "or choose another folder."
            )


def _described(folder: Path) -> dict[str, Any]:
    """Returns the configuration in `config.yaml`; empty when there is none that can be read."""
    try:
        return load_config(folder / CONFIG_FILE).model_dump(mode="json")
    except GradscopeError:
        return {}


def _identity(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the dotted keys that must not change, options left at a plug-in's default included."""
    options = {**_defaults("workflow", WORKFLOWS, content), **_defaults("task", TASKS, content)}
    for section in FIXED_SECTIONS:
        options |= {f"{section}.{key}": value for key, value in content.get(section, {}).items()}
    # A plug-in of another name explains its other options, so names come first.
    keys = ("workflow.name", "task.name", *FIXED_KEYS)
    named = {key: content.get(key.partition(".")[0], {}).get(key.partition(".")[2]) for key in keys}
    return {**named, **options}


def _defaults(kind: str, registry: Any, content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name = content.get(kind, {}).get("name")
    if name is None:
        return {}
    try:
        parameters = plugin_parameters(registry.get(name))
    except GradscopeError:  # a plug-in that is not here any more; its name differs anyway
        return {}
    return {f"{kind}.{key}": parameter.default for key, parameter in parameters.items()}


def load_last_whole(folder: Path, policies: Policies) -> tuple[State, list[str]]:
    """Puts the last checkpoint that can be read into the policies.

    Returns:
        Its state, and the names of later ones that are damaged.

    Raises:
        RunFileError: There are checkpoints, but none can be read.
    """
    damaged: list[str] = []
    for step in reversed(checkpoint_steps(folder)):
        checkpoint = find_checkpoint(folder, step)
        assert checkpoint is not None
        try:
            return load_checkpoint(checkpoint, policies), damaged
        except RunFileError as error:
            if not damaged:
                first = error
            damaged.append(checkpoint.name)
    raise RunFileError(f"{first} None of the {len(damaged)} checkpoints can be read.")


def put_aside(folder: Path, names: list[str]) -> None:
    """Renames damaged checkpoints, so that their steps can be saved anew."""
    for name in names:
        target = folder / FOLDER / f"{DAMAGED}{name}"
        shutil.rmtree(target, ignore_errors=True)
        (folder / FOLDER / name).rename(target)
