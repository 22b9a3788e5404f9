"""Checkpoints: adapters in PEFT's layout, optimizer state and the step; whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gradscope.errors import RunFileError
from gradscope.train.policy import Policies

FOLDER = "checkpoints"
LATEST, BEST = "latest", "best"
STATE_FILE = "state.json"
WEIGHTS_FILE, OPTIMIZER_FILE = "adapter_model.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class State:
    """What a checkpoint knows besides tensors.

    Attributes:
        step: Last training step that it contains.
        policies: Names of its policies.
        best_step: Step of the best checkpoint so far; None before the first evaluated one.
        best_accuracy: Its held-out accuracy.
    """

    step: int
    policies: tuple[str, ...]
    best_step: int | None = None
    best_accuracy: float = -1.0


def save_checkpoint(run: Path, policies: Policies, state: State, *, keep: int) -> Path:
    """Writes a checkpoint, points `latest` (and `best`) at it, and removes old ones.

    The folder is written beside its place and renamed, so a crash leaves the one before.

    Args:
        run: Run directory.
        policies: Adapters and optimizers.
        state: What else to keep; when `best_step` is its own step, `best` points here too.
        keep: Latest checkpoints to keep; the best one is kept beside them.
    """
    folder = run / FOLDER
    target, scratch = folder / _name(state.step), folder / f".{_name(state.step)}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    for name in policies.names:
        adapter = scratch / name
        adapter.mkdir(parents=True)
        weights = get_peft_model_state_dict(policies.peft, adapter_name=name)
        save_file({key: value.contiguous() for key, value in weights.items()}, adapter / WEIGHTS_FILE)
        policies.peft.peft_config[name].save_pretrained(str(adapter))
        torch.save(policies.optimizers[name].state_dict(), adapter / OPTIMIZER_FILE)
    (scratch / STATE_FILE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
    for path in (*scratch.rglob("*"), scratch):
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    os.replace(scratch, target)
    _point(folder / LATEST, target.name)
    if state.best_step == state.step:
        _point(folder / BEST, target.name)
    _sync(folder)
    _prune(folder, keep=keep, best_step=state.best_step)
    return target


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
        return folder / _name(steps[-1])
    if which == "best":
        pointer = folder / BEST
        found = folder / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    else:
        found = folder / _name(int(which)) if str(which).isdigit() else None
    if found is None or not found.is_dir():
        raise RunFileError(
            f"{run}: no checkpoint '{which}'. Allowed: last, "
            f"{'best, ' if (folder / BEST).is_file() else ''}{', '.join(map(str, steps))}."
        )
    return found


def checkpoint_steps(run: Path) -> list[int]:
    """Returns the steps that a run has checkpoints of."""
    return sorted(int(path.parent.name[5:]) for path in (run / FOLDER).glob(f"step_*/{STATE_FILE}"))


def load_checkpoint(checkpoint: Path, policies: Policies, *, with_optimizers: bool = True) -> State:
    """Puts a checkpoint's weights (and optimizer states) into the policies.

    Raises:
        RunFileError: Files are missing or damaged, or it is of other policies.
    """
    try:
        content = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        state = State(**{**content, "policies": tuple(content["policies"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunFileError(
            f"{checkpoint / STATE_FILE}: cannot be read ({error}). Take another one."
        ) from error
    if state.policies != policies.names:
        raise RunFileError(
            f"{checkpoint}: holds policies {', '.join(state.policies)}, the configuration asks for "
            f"{', '.join(policies.names)}. Use the run's own config.yaml."
        )
    for name in policies.names:
        try:
            _load_policy(checkpoint / name, policies, name, with_optimizer=with_optimizers)
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunFileError(
                f"{checkpoint / name}: does not fit the model and adapters, or is damaged ({reason}). "
                "Use the run's own config.yaml, or another checkpoint."
            ) from error
    return state


def _load_policy(folder: Path, policies: Policies, name: str, *, with_optimizer: bool) -> None:
    weights = load_file(folder / WEIGHTS_FILE)
    expected = get_peft_model_state_dict(policies.peft, adapter_name=name)
    if expected.keys() != weights.keys() or any(expected[k].shape != v.shape for k, v in weights.items()):
        raise ValueError("names or shapes of the adapter differ")
    set_peft_model_state_dict(policies.peft, weights, adapter_name=name)
    if with_optimizer:
        content = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        policies.optimizers[name].load_state_dict(content)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _point(pointer: Path, name: str) -> None:
    scratch = pointer.with_name(f".{pointer.name}.tmp")
    scratch.write_text(name + "\n", encoding="utf-8")
    _sync(scratch)
    os.replace(scratch, pointer)


def _prune(folder: Path, *, keep: int, best_step: int | None) -> None:
    steps = checkpoint_steps(folder.parent)
    for step in steps[:-keep]:
        if step != best_step:
            shutil.rmtree(folder / _name(step))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
