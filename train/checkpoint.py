"""Checkpoints: adapters in PEFT's layout, optimizer state and the step; whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gradscope.errors import RunFileError
from gradscope.runfile.durable import sync, write_atomically
from gradscope.train.policy import Policies

FOLDER = "checkpoints"
STATE_FILE = "state.json"
WEIGHTS_FILE, OPTIMIZER_FILE = "adapter_model.safetensors", "optimizer.pt"
PROBES_FILE = "probes.pt"


@dataclass(frozen=True)
class State:
    """What a checkpoint knows besides tensors.

    Attributes:
        step: Last training step that it contains.
        policies: Names of its policies.
        best_step: Step of the best checkpoint so far; None before the first evaluated one.
        best_accuracy: Its held-out accuracy.
        tracker_ids: Tracker to its id of the run, by which it goes on there.
    """

    step: int
    policies: tuple[str, ...]
    best_step: int | None = None
    best_accuracy: float = -1.0
    tracker_ids: dict[str, str] = field(default_factory=dict)


def save_checkpoint(
    run: Path, policies: Policies, state: State, *, keep: int, measured: Mapping[str, Any] | None = None
) -> Path:
    """Writes a checkpoint and removes old ones.

    The folder is written beside its place and renamed, so a crash leaves the one before. A run comes to a
    step's weights in one way only, so those of a checkpoint that is there stay as they are.

    Args:
        run: Run directory.
        policies: Adapters and optimizers.
        state: What else to keep.
        keep: Latest checkpoints to keep; the best one and this one are kept beside them.
        measured: What probes need to go on; nothing is written without.
    """
    folder = run / FOLDER
    target = folder / _name(state.step)
    if (target / STATE_FILE).is_file():
        write_atomically(target / STATE_FILE, _as_json(state))
    else:
        scratch = target.with_name(f".{target.name}.tmp")
        try:
            _write(scratch, target, policies, state, measured)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    _prune(run, keep=keep, spared=(state.step, state.best_step))
    return target


def _write(
    scratch: Path, target: Path, policies: Policies, state: State, measured: Mapping[str, Any] | None
) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    for name in policies.names:
        adapter = scratch / name
        adapter.mkdir(parents=True)
        weights = policies.saved_weights(name)
        save_file({key: value.contiguous() for key, value in weights.items()}, adapter / WEIGHTS_FILE)
        policies.peft.peft_config[name].save_pretrained(str(adapter))
        torch.save(policies.optimizers[name].state_dict(), adapter / OPTIMIZER_FILE)
    if measured:
        torch.save(dict(measured), scratch / PROBES_FILE)
    (scratch / STATE_FILE).write_text(_as_json(state), encoding="utf-8")
    for path in (*scratch.rglob("*"), scratch):
        sync(path)
    # A folder without its state is no checkpoint, whatever else lies in it.
    shutil.rmtree(target, ignore_errors=True)
    os.replace(scratch, target)
    sync(target.parent)


def find_checkpoint(run: Path, which: str | int = "last") -> Path | None:
    """Returns the folder of a checkpoint; None when the run has none at all yet.

    Args:
        run: Run directory.
        which: `last`, `best`, or a step.

    Raises:
        RunFileError: There are checkpoints, but not that one.
    """
    folder = run / FOLDER
    steps = checkpoint_steps(run)
    if not steps:
        return None
    if which == "last":
        step: int | None = steps[-1]
    elif which == "best":
        step = _read_state(folder / _name(steps[-1])).best_step
    else:
        step = int(which) if str(which).isdigit() else None
    if step is None or step not in steps:
        best = "" if which == "best" else "best, "
        raise RunFileError(
            f"{run}: no checkpoint '{which}'. Allowed: last, {best}{', '.join(map(str, steps))}."
        )
    return folder / _name(step)


def checkpoint_steps(run: Path) -> list[int]:
    """Returns the steps that a run has checkpoints of."""
    names = (path.parent.name[5:] for path in (run / FOLDER).glob(f"step_*/{STATE_FILE}"))
    return sorted(int(name) for name in names if name.isdigit())


def load_checkpoint(checkpoint: Path, policies: Policies, *, with_optimizers: bool = True) -> State:
    """Puts a checkpoint's weights (and optimizer states) into the policies.

    Raises:
        RunFileError: Files are missing or damaged, or it is of other policies.
    """
    state = _read_state(checkpoint)
    if state.policies != policies.names:
        raise RunFileError(
            f"{checkpoint}: holds policies {', '.join(state.policies)}, the configuration asks for "
            f"{', '.join(policies.names)}. Use the run's own config.yaml."
        )
    for name in policies.names:
        try:
            _load_policy(checkpoint / name, policies, name, with_optimizer=with_optimizers)
        except Exception as error:  # whatever the readers make of a damaged file
            reason = " ".join(str(error).split()).partition(". ")[0][:120]
            raise RunFileError(
                f"{checkpoint / name}: does not fit the model and adapters, or is damaged ({reason}). "
                "Use the run's own config.yaml, or another checkpoint."
            ) from error
    return state


def load_measured(run: Path, step: int) -> dict[str, Any] | None:
    """Returns what probes saved with the checkpoint of a step; None where nothing can be read."""
    try:
        content: dict[str, Any] = torch.load(
            run / FOLDER / _name(step) / PROBES_FILE, weights_only=True, map_location="cpu"
        )
    except Exception:  # whatever torch makes of an absent or damaged file: training goes on without
        return None
    return content


def _load_policy(folder: Path, policies: Policies, name: str, *, with_optimizer: bool) -> None:
    policies.load_weights(name, load_file(folder / WEIGHTS_FILE))
    if with_optimizer:
        content = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        policies.optimizers[name].load_state_dict(content)


def _read_state(checkpoint: Path) -> State:
    try:
        content = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        return State(**{**content, "policies": tuple(content["policies"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunFileError(
            f"{checkpoint / STATE_FILE}: cannot be read ({error}). Take another one."
        ) from error


def _as_json(state: State) -> str:
    return json.dumps(asdict(state), indent=2)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _prune(run: Path, *, keep: int, spared: Collection[int | None]) -> None:
    for step in checkpoint_steps(run)[:-keep]:
        if step not in spared:
            shutil.rmtree(run / FOLDER / _name(step))
