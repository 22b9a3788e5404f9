"""The names under which trainers log, as names of the run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.schema import TABLES

RENAMED = {"reward": "episode_reward_mean"}
"""Trainer's name -> name of `/train`."""
MEASURED = ("grad_norm", "loss")
"""Numbers that the probes read themselves, of every step: trainers log the mean of the loss since they logged
last."""
PHASES = {"step_time": "step"}
"""Trainer's name of a duration in seconds -> phase of `seconds`."""


def step_metrics(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a trainer logs, by the names of the run file.

    What the run file has no name for keeps its own, and what it knows slot by slot only goes to
    `trainer/NAME`: a trainer's `entropy` is one number for all rows.
    """
    metrics: dict[str, Any] = {}
    for name, value in logs.items():
        if name in MEASURED or value is None:
            continue
        if name in PHASES:
            metrics["seconds"] = {PHASES[name]: value}
        else:
            metrics[_name(RENAMED.get(name, name))] = value
    return metrics


def _name(name: str) -> str:
    variable = TABLES["train"].variable(name)
    return f"trainer/{name}" if variable is not None and len(variable.dims) > 1 else name
