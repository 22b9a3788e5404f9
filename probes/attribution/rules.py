"""What known optimizers make of a gradient: linear in it but for a scale that is read from their state.

For an effective gradient e (clipped, negated under `maximize`, with the weight decay that enters gradients):

    m <- retain m + admit e        u = scale (from_momentum m + from_gradient e)        theta <- theta - u

The same holds for every part of e, so parts of m and u add up to the whole. Decoupled decay is a part of its
own, u = learning_rate weight_decay theta (AdamW: Loshchilov and Hutter 2019, algorithm 2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Settings = Mapping[str, Any]
"""One of an optimizer's param_groups."""
Gather = Callable[[str], torch.Tensor]
"""Returns states of a name for the parameters of a segment, `[n]`, float64."""


@dataclass(frozen=True)
class Move:
    """One step on parameters with the same settings and the same age.

    Attributes:
        sign: -1 where the optimizer ascends, else 1.
        retain: Part of the momentum that stays.
        admit: Part of the gradient that enters the momentum.
        from_momentum: Weight of the momentum in the change.
        from_gradient: Weight of the gradient in the change.
        coupled_decay: Multiple of the parameters that is added to the gradient.
        decoupled_decay: Multiple of the parameters that is taken off them.
        scale: Factor of the change, or one for each number, `[n]`; read after the step.
    """

    sign: float
    retain: float
    admit: float
    from_momentum: float
    from_gradient: float
    coupled_decay: float
    decoupled_decay: float
    scale: Callable[[Gather], torch.Tensor | float]


class Rule(Protocol):
    """How an optimizer moves parameters."""

    momentum: str
    """Name of the momentum among the states of a parameter."""

    def ages(self, states: Sequence[Settings]) -> list[int]:
        """Returns for each parameter, from its states before the step, a number that `move` depends on."""

    def move(self, group: Settings, age: int) -> Move:
        """Returns the step on parameters of a group and an age."""


class AdamRule:
    """torch.optim.Adam and AdamW; an age is the number of steps before this one."""

    momentum = "exp_avg"

    def ages(self, states: Sequence[Settings]) -> list[int]:
        """Returns the steps that were counted before this one."""
        steps = [state["step"] for state in states if "step" in state]
        if not steps:
            return [0] * len(states)
        # One copy to the host, also where the optimizer counts on a device.
        counted = iter(torch.stack([torch.as_tensor(step) for step in steps]).tolist())
        return [int(next(counted)) if "step" in state else 0 for state in states]

    def move(self, group: Settings, age: int) -> Move:
        """Returns the step as `torch.optim.Adam` documents it."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rate, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        square = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        correction1, correction2 = 1 - beta1 ** (age + 1), 1 - beta2 ** (age + 1)

        def scale(gather: Gather) -> torch.Tensor:
            root = gather(square).sqrt().div_(correction2**0.5).add_(eps)
            return root.reciprocal_().mul_(rate / correction1)

        decoupled = bool(group.get("decoupled_weight_decay", False))
        return Move(
            sign=-1.0 if group["maximize"] else 1.0,
            retain=beta1,
            admit=1 - beta1,
            from_momentum=1.0,
            from_gradient=0.0,
            coupled_decay=0.0 if decoupled else decay,
            decoupled_decay=rate * decay if decoupled else 0.0,
            scale=scale,
        )


class SGDRule:
    """torch.optim.SGD; an age is 0 where there is no momentum yet, else 1."""

    momentum = "momentum_buffer"

    def ages(self, states: Sequence[Settings]) -> list[int]:
        """Returns whether there is a momentum."""
        return [int(state.get(self.momentum) is not None) for state in states]

    def move(self, group: Settings, age: int) -> Move:
        """Returns the step as `torch.optim.SGD` documents it."""
        momentum, rate = float(group["momentum"]), float(group["lr"])
        nesterov = bool(group["nesterov"])
        return Move(
            sign=-1.0 if group["maximize"] else 1.0,
            retain=momentum if age else 0.0,
            # The first gradient becomes the momentum undamped.
            admit=0.0 if momentum == 0 else (1 - float(group["dampening"]) if age else 1.0),
            from_momentum=0.0 if momentum == 0 else (momentum if nesterov else 1.0),
            from_gradient=1.0 if momentum == 0 or nesterov else 0.0,
            coupled_decay=float(group["weight_decay"]),
            decoupled_decay=0.0,
            scale=lambda gather: rate,
        )


_RULES: tuple[tuple[type[torch.optim.Optimizer], Rule], ...] = (
    (torch.optim.Adam, AdamRule()),
    (torch.optim.SGD, SGDRule()),
)


def find_rule(optimizer: torch.optim.Optimizer) -> Rule | str:
    """Returns how an optimizer moves parameters, or why that is not known.

    A subclass counts as what it derives from as long as it leaves `step` alone.
    """
    kind = type(optimizer)
    for known, rule in _RULES:
        if isinstance(optimizer, known) and inspect.unwrap(kind.step) is inspect.unwrap(known.step):
            return _unreadable(optimizer) or rule
    return (
        f"{kind.__module__}.{kind.__qualname__} is no optimizer whose step is known; attributed are the "
        "changes of torch.optim.AdamW, Adam and SGD"
    )


def _unreadable(optimizer: torch.optim.Optimizer) -> str:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "the optimizer is differentiable=True"
        for parameter in group["params"]:
            if parameter.is_complex() or parameter.layout != torch.strided:
                return "the optimizer holds complex or sparse parameters"
    return ""


def underlying(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside wrappers such as accelerate's, which hold it as `optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    return underlying(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def groups_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """Returns the number of the param_group of each parameter."""
    return {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
