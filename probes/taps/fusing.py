"""Puts fused nodes on a model: LoRA layers whole, other trained linear layers and norms one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradscope.probes.taps.capture import Collector
from gradscope.probes.taps.fused import FusedLinear, is_plain_linear, replace_forward
from gradscope.probes.taps.fused_norm import FusedNorm, fusable_norm
from gradscope.probes.taps.lora_layer import fuse_lora_layers
from gradscope.probes.targets import Target


@dataclass(frozen=True)
class Fusion:
    """What was put on a model.

    Attributes:
        untapped: `id` of the modules that measure by themselves, so that a tap on them would count twice.
        undo: What gives each module its own forward back.
    """

    untapped: frozenset[int]
    undo: list[Callable[[], None]]

    def remove(self) -> None:
        """Gives every module its own forward back."""
        while self.undo:
            self.undo.pop()()


def fuse(model: nn.Module, targets: Sequence[Target], collector: Collector) -> Fusion:
    """Replaces the forward of every layer that a node can stand for."""
    undo = [fuse_lora_layers(model, {id(target.module): target for target in targets}, collector)]
    adapters = _adapter_matrices(model)
    linear = [
        target for target in targets if target.claim.kind == "linear" and is_plain_linear(target.module)
    ]
    whole = [target for target in linear if id(target.module) not in adapters]
    norms = [target for target in targets if fusable_norm(target)]
    undo += [replace_forward(target.module, FusedLinear(target, collector)) for target in whole]
    undo += [replace_forward(target.module, FusedNorm(target, collector)) for target in norms]
    return Fusion(frozenset(id(target.module) for target in (*whole, *norms)), undo)


def _adapter_matrices(model: nn.Module) -> set[int]:
    """Returns the `id` of the layers that LoRA layers keep: their taps serve calls that no node can do."""
    found: set[int] = set()
    for module in model.modules():
        parts: list[Any] = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
        for part in parts:
            if isinstance(part, nn.ModuleDict):
                found.update(id(matrix) for matrix in part.values())
    return found
