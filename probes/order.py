"""Watches every optimizer step for loops that call `step` too late, or without their loss scaler."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

TOO_LATE = (
    "step(): optimizer.step() ran while policy '{policy}' had rows that step() had not seen, so that they "
    "were applied unmeasured; call scope.step(optimizer) after the last backward(), before optimizer.step()."
)
UNSCALED = (
    "step() was not given the GradScaler that scales the loss by {scale:g}: gradient norms of the last "
    "record are too large by that, products by its square; call scope.step(optimizer, scaler=scaler)."
)
SCALER_FRAMES = 12
"""Frames above an optimizer's step among which the scaler that calls it is, wrappers included."""


class StepOrder:
    """A hook that all optimizers share: one that `step` was never given is seen as well.

    Args:
        unseen_policy: Says which policy of an optimizer has rows that `step` has not seen; empty for none.
        fail: Takes what the next `step` raises.
        warn: Takes a warning.
    """

    def __init__(
        self,
        unseen_policy: Callable[[torch.optim.Optimizer], str],
        fail: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._unseen_policy = unseen_policy
        self._fail = fail
        self._warn = warn
        self._without_scaler: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handle = _hook(weakref.WeakMethod(self._look))

    def expect(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Notes whether the update that an optimizer is about to make was measured with a scaler."""
        if scaler is None:
            self._without_scaler.add(optimizer)
        else:
            self._without_scaler.discard(optimizer)

    def remove(self) -> None:
        """Takes the hook off."""
        self._handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if policy := self._unseen_policy(optimizer):
            self._fail(TOO_LATE.format(policy=policy))
        elif optimizer in self._without_scaler:
            self._without_scaler.discard(optimizer)
            scale = _scale_of_caller()
            if scale != 1:
                self._warn(UNSCALED.format(scale=scale))
                self._fail(UNSCALED.format(scale=scale))


def _hook(look: weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]) -> RemovableHandle:
    """Places a hook that does not keep a forgotten scope alive, and does nothing once that is gone.

    It cannot take itself off: optimizers are going through the hooks when it learns of it.
    """

    def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = look()
        if alive is not None:
            alive(optimizer)

    return register_optimizer_step_pre_hook(hook)


def _scale_of_caller() -> float:
    """Returns the loss scale of the `GradScaler` that is stepping an optimizer; 1 without one."""
    frame = sys._getframe()
    for _ in range(SCALER_FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
                return float(caller.get_scale())
    return 1.0
