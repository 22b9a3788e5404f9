"""One tap for both matrices of a LoRA layer: half the autograd nodes that a tap on each makes.

PEFT computes v = u B^T with u = dropout(x) A^T. The tap stands behind A: it sees x, u and, in the backward,
the gradient of u. The gradient of v, which comes first, is left there for it by a hook on v that keeps none
of the forward. Autograd computes what it computes without a tap, so `.grad` stays bitwise what it is.

Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from gradscope.probes.taps.capture import Collector, Tap
from gradscope.probes.taps.factors import Factors
from gradscope.probes.taps.fused import Passage, cast, passage
from gradscope.probes.taps.lora_layer import Adapter, lora_layers, plain_adapters
from gradscope.probes.targets import Target


def pair_matrices(model: nn.Module, targets: Mapping[int, Target]) -> Iterator[Adapter]:
    """Returns the adapters whose B is called on what A returned and nothing else.

    Args:
        model: The model.
        targets: What is tapped, by the `id` of its module.
    """
    for layer in lora_layers(model):
        for adapter in plain_adapters(layer, targets).values():
            if adapter.name not in layer.lora_variant:
                yield adapter


def tap_pair(adapter: Adapter, collector: Collector) -> dict[int, Tap]:
    """Returns the forward hooks of A and B, by the `id` of the module."""
    first = FirstTap(adapter, collector)
    return {id(adapter.first.module): first, id(adapter.second.module): SecondTap(adapter, collector, first)}


class Handover:
    """Where the gradient of v waits for the tap behind A."""

    def __init__(self) -> None:
        self.dv: torch.Tensor | None = None

    def leave(self, dv: torch.Tensor) -> None:
        """Keeps the gradient until it is taken."""
        self.dv = dv

    def take(self) -> torch.Tensor | None:
        """Returns the gradient, if one came, and keeps it no longer."""
        dv, self.dv = self.dv, None
        return dv


class FirstTap(Tap):
    """Forward hook of A; `waiting` is what its last call left for B's."""

    def __init__(self, adapter: Adapter, collector: Collector) -> None:
        super().__init__(adapter.first, collector)
        self.adapter = adapter
        self.waiting: tuple[torch.Tensor, Handover] | None = None

    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns u with the tap behind it; None (unchanged) without gradients."""
        self.waiting = None
        if not (torch.is_grad_enabled() and output.requires_grad):
            return super().__call__(module, args, kwargs, output)
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        handover = Handover()
        rows = passage(self.collector, self.target, self.adapter.policy, x)
        call = LoraTapCall(rows, self.adapter, handover, bool(module.weight.requires_grad))
        u = _Behind.apply(output, cast(x, output.dtype), call)
        self.waiting = (u, handover)
        return u


class SecondTap(Tap):
    """Forward hook of B."""

    def __init__(self, adapter: Adapter, collector: Collector, first: FirstTap) -> None:
        super().__init__(adapter.second, collector)
        self.first = first

    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Has the gradient of v left for the tap behind A; taps B alone where A has none."""
        waiting, self.first.waiting = self.first.waiting, None
        if waiting is None or not args or args[0] is not waiting[0]:
            return super().__call__(module, args, kwargs, output)
        if output.requires_grad and module.weight.requires_grad:
            output.register_hook(waiting[1].leave)
        return None


class LoraTapCall(NamedTuple):
    """One call of an adapter; `trained` says whether A was then, since `set_adapter` may change it."""

    rows: Passage
    adapter: Adapter
    handover: Handover
    trained: bool


class _Behind(torch.autograd.Function):
    """Hands u on and, in the backward, its gradient; on its way the tap sees it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, x: torch.Tensor, call: LoraTapCall) -> torch.Tensor:
        ctx.save_for_backward(x, output)
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Detached, not returned as it is: a view made here would forbid in-place operations on the output.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (du,) = gradients
        rows, adapter, handover, trained = ctx.call
        dv = handover.take()
        if rows.batch is None and not rows.rows_unknown:
            return du, None, None
        x, u = ctx.saved_tensors
        layer = []
        first, second = adapter.first.parameters["weight"], adapter.second.parameters["weight"]
        if du is not None and trained:
            layer.append(Factors(first, du.reshape(-1, du.shape[-1]), x.reshape(-1, x.shape[-1])))
        if dv is not None:
            layer.append(Factors(second, dv.reshape(-1, dv.shape[-1]), u.reshape(-1, u.shape[-1])))
        if layer:
            rows.collect(layer, x, totals=False)
        return du, None, None
