"""A LoRA layer of PEFT as one autograd node, in place of the half dozen that its own forward makes.

y = x W^T + s dropout(x) A^T B^T. With u = s dropout(x) A^T and v = s dy B, the backward is
dx = dy W + dropout'(v A), dA = v^T dropout(x), dB = dy^T u. The types are PEFT's: the adapter's input is
cast to the type of A, the sum is handed out in the type of the base layer.

Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gradscope.probes.taps.capture import Collector
from gradscope.probes.taps.factors import Factors
from gradscope.probes.taps.fused import (
    Passage,
    cast,
    compute_type,
    is_plain_linear,
    narrower,
    passage,
    replace_forward,
)
from gradscope.probes.targets import Target

PEFT_LAYER = "peft.tuners.lora.layer"


def fuse_lora_layers(
    model: nn.Module, targets: Mapping[int, Target], collector: Collector
) -> Callable[[], None]:
    """Replaces the forward of the model's plain LoRA layers; returns what undoes it.

    The taps on `lora_A` and `lora_B` stay: they are silent while the node runs, and measure when a call is
    left to PEFT's forward (several active adapters, DoRA, merged weights, `adapter_names`, ...).

    Args:
        model: The model.
        targets: What is tapped, by the `id` of its module.
        collector: Where gradients go.
    """
    undo = [
        replace_forward(layer, FusedLora(layer, adapters, collector))
        for layer in list(lora_layers(model))
        if is_plain_linear(layer.base_layer) and (adapters := plain_adapters(layer, targets))
    ]

    def restore() -> None:
        for each in undo:
            each()

    return restore


@dataclass(frozen=True)
class Adapter:
    """One adapter of a layer.

    Attributes:
        name: Its name.
        first: A, as it is tapped.
        second: B.
        policy: The policy that trains it.
        dropout: The dropout before A.
    """

    name: str
    first: Target
    second: Target
    policy: str
    dropout: nn.Module


def lora_layers(model: nn.Module) -> Iterator[Any]:
    """Returns the linear LoRA layers of PEFT that have PEFT's own forward; none without PEFT."""
    peft: Any = sys.modules.get(PEFT_LAYER)
    for module in model.modules() if peft is not None else ():
        if type(module).forward is peft.Linear.forward and "forward" not in module.__dict__:
            yield module


def plain_adapters(layer: Any, targets: Mapping[int, Target]) -> dict[str, Adapter]:
    """Returns the adapters of a layer that are two matrices without bias and nothing else.

    Args:
        layer: A LoRA layer.
        targets: What is tapped, by the `id` of its module.
    """
    found = {}
    for name, first in layer.lora_A.items():
        second = layer.lora_B[name]
        known = id(first) in targets and id(second) in targets
        if known and all(is_plain_linear(part) and part.bias is None for part in (first, second)):
            tapped = targets[id(first)]
            dropout = layer.lora_dropout[name]
            found[name] = Adapter(name, tapped, targets[id(second)], tapped.policy, dropout)
    return found


class FusedLora:
    """Forward of one LoRA layer."""

    def __init__(self, layer: Any, adapters: Mapping[str, Adapter], collector: Collector) -> None:
        self.layer = layer
        self.base: Any = layer.base_layer
        self.adapters = dict(adapters)
        self.collector = collector
        self.original = layer.forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what the layer returns, through one node where that is possible."""
        adapter = None if args or kwargs else self._adapter()
        if adapter is None or not self._fusable(x, adapter):
            return self.original(x, *args, **kwargs)
        # Looked up where modules keep them: the attribute costs ten times as much.
        base = self.base._parameters
        parts: tuple[Any, Any] = (adapter.first.module, adapter.second.module)
        first, second = (part._parameters["weight"] for part in parts)
        noise, dropout = None, adapter.dropout
        if dropout.training and not isinstance(dropout, nn.Identity):
            # The factors that dropout draws for the adapter's input: PEFT draws the same numbers.
            noise = dropout(torch.ones_like(x, dtype=first.dtype))
        rows = passage(self.collector, adapter.first, adapter.policy, x)
        call = LoraPassage(rows, adapter, float(self.layer.scaling[adapter.name]))
        return _Lora.apply(x, first, second, base["weight"], base["bias"], noise, call)

    def _adapter(self) -> Adapter | None:
        """Returns the adapter that a call goes through, alone and with gradients; None where it does not."""
        layer = self.layer
        active = layer.active_adapter
        if not isinstance(active, str):
            active = active[0] if len(active) == 1 else ""
        special = layer.disable_adapters or layer.merged_adapters or active in layer.lora_variant
        compiling = torch.compiler.is_compiling()
        return None if special or compiling or not torch.is_grad_enabled() else self.adapters.get(active)

    def _fusable(self, x: torch.Tensor, adapter: Adapter) -> bool:
        """Whether the node can do what the layer does with this input."""
        base: Any = self.base
        first: Any = adapter.first.module
        second: Any = adapter.second.module
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return False
        a, b = first._parameters["weight"], second._parameters["weight"]
        if not (x.requires_grad or a.requires_grad or b.requires_grad):
            return False
        # Each of the two has our own tap; whoever else hooks them wants to see them called.
        hooks = (base._forward_hooks, base._forward_pre_hooks, first._forward_pre_hooks)
        if (
            any(hooks)
            or second._forward_pre_hooks
            or len(first._forward_hooks) + len(second._forward_hooks) > 2
        ):
            return False
        castable = x.dtype == a.dtype or getattr(self.layer, "cast_input_dtype_enabled", True)
        return bool(castable and a.dtype == b.dtype and x.is_floating_point())


class LoraPassage(NamedTuple):
    """One call of a LoRA layer."""

    rows: Passage
    adapter: Adapter
    scaling: float


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        noise: torch.Tensor | None,
        call: LoraPassage,
    ) -> torch.Tensor:
        base_type, dtype = compute_type(x, weight.dtype), compute_type(x, first.dtype)
        x_base, weight = cast(x, base_type), cast(weight, base_type)
        y = functional.linear(x_base, weight, None if bias is None else cast(bias, base_type))
        first, second = cast(first, dtype), cast(second, dtype)
        u_TR = _scaled_product(_adapter_input(x, noise, dtype), first.t(), call.scaling)
        y_TO = y.view(-1, y.shape[-1])
        if dtype == base_type:
            y_TO.addmm_(u_TR, second.t())
        else:
            y_TO.add_(u_TR @ second.t())
        ctx.save_for_backward(narrower(x, x_base), u_TR, first, second, weight, noise)
        ctx.call, ctx.dtype = call, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, u_TR, first, second, weight, noise = ctx.saved_tensors
        rows, adapter, scaling = ctx.call
        for_x, for_first, for_second = ctx.needs_input_grad[:3]
        dy_TO = gradients[0].reshape(-1, weight.shape[0])
        own_TO = cast(dy_TO, u_TR.dtype)
        layer, dx = [], None
        if for_x or for_first:
            v_TR = _scaled_product(own_TO, second, scaling)
        if for_x:
            dx = cast(_input_gradient(dy_TO @ weight, v_TR, first, noise).view(x.shape), ctx.dtype)
        if for_first:
            x_TI = _adapter_input(x, noise, u_TR.dtype)
            layer.append(Factors(adapter.first.parameters["weight"], v_TR, x_TI))
        if for_second:
            layer.append(Factors(adapter.second.parameters["weight"], own_TO, u_TR))
        found = iter(rows.gradients(layer, x) if layer else ())
        d_first = next(found) if for_first else None
        d_second = next(found) if for_second else None
        return dx, d_first, d_second, None, None, None, None


def _adapter_input(x: torch.Tensor, noise: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns what A multiplies, `[T, I]`."""
    x_TI = cast(x.reshape(-1, x.shape[-1]), dtype)
    return x_TI if noise is None else x_TI * cast(noise.view(x_TI.shape), dtype)


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns `scaling * a @ b` in one product."""
    # With beta 0 nothing of the first tensor is read.
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scaling)


def _input_gradient(
    dx_TI: torch.Tensor, v_TR: torch.Tensor, first_RI: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """Adds the adapter's share to the base layer's gradient of the input, in place."""
    if noise is None and dx_TI.dtype == v_TR.dtype:
        return dx_TI.addmm_(v_TR, first_RI)
    own_TI = v_TR @ first_RI
    return dx_TI.add_(own_TI if noise is None else own_TI.mul_(cast(noise.view(own_TI.shape), own_TI.dtype)))
