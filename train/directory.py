"""The run directory: which folder a run takes, and the files that describe the run beside its numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from gradscope.errors import GradscopeError, RunFileError
from gradscope.runfile.durable import write_atomically
from gradscope.runfile.paths import RunPaths
from gradscope.train.checkpoint import FOLDER, checkpoint_steps
from gradscope.train.config import Config, load_config, to_yaml
from gradscope.train.config.presets import scale_names, scale_of

CONFIG_FILE, ENVIRONMENT_FILE = "config.yaml", "environment.json"


def check_out(folder: Path, *, resume: bool) -> bool:
    """Returns whether there is a run in a folder to go on with.

    Raises:
        RunFileError: There is one and it is not to be resumed, or its checkpoints without its numbers.
    """
    paths = RunPaths.of(folder)
    if paths.exists():
        if not resume:
            raise RunFileError(
                f"{folder}: holds a run already. Add --resume (resume=True) to go on with it, "
                "or choose another folder."
            )
        return True
    if checkpoint_steps(folder):
        raise RunFileError(
            f"{folder}: holds checkpoints of a run in {FOLDER}/, but no {paths.file.name} to go on with. "
            f"Choose another folder, or move {FOLDER}/ away."
        )
    return False


def default_out(config: Config) -> Path:
    """Returns the directory of a run that is not given one.

    It is `runs/{workflow}-{policies}-{task}[-{scale}]-seed{seed}`; the smallest scale is left out, as in the
    names of cells, and a model of the user's own stands for its scale.
    """
    routing, path = config.policy.routing, config.model.path
    policies = routing if isinstance(routing, str) else "mapped"
    scale = scale_of(path) or Path(path).absolute().name
    parts = [config.workflow.name, policies, config.task.name]
    if scale != scale_names()[0]:
        parts.append(scale)
    return Path("runs") / re.sub(r"[^\w.-]", "_", "-".join([*parts, f"seed{config.train.seed}"]))


def write_description(folder: Path, config: Config, environment: Mapping[str, object]) -> None:
    """Writes the configuration and the environment of a run."""
    write_atomically(folder / CONFIG_FILE, to_yaml(config))
    write_atomically(folder / ENVIRONMENT_FILE, json.dumps(environment, indent=2))


def config_change(folder: Path, config: Config) -> str:
    """Returns how a run's configuration differs from that of before, with both values; empty if it does not.

    A file of before that cannot be read is such a difference, and no reason to give the run up.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        return ""
    try:
        earlier = load_config(file)
    except GradscopeError as error:
        return f"the configuration of before cannot be read: {error}"
    before, now = earlier.model_dump(mode="json"), config.model_dump(mode="json")
    changes = [
        f"{section}.{key} {before[section].get(key)!r} -> {now[section].get(key)!r}"
        for section in now
        for key in {**before[section], **now[section]}
        if before[section].get(key) != now[section].get(key)
    ]
    return f"changed: {', '.join(changes)}" if changes else ""
