"""A LoRA layer of PEFT as one autograd node, in place of the half dozen that its own forward makes.

y = x W^T + s dropout(x) A^T B^T. With u = s dropout(x) A^T and v = s dy B, the backward is
dx = dy W + dropout'(v A), dA = v^T dropout(x), dB = dy^T u. The types are PEFT's: the adapter's input is
cast to the type of A, the sum is handed out in the type of the base layer.

Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradscope.probes.taps.capture import Collector, Tap
from gradscope.probes.taps.factors import Factors
from gradscope.probes.taps.fused import (
    Passage,
    compute_type,
    is_plain_linear,
    narrower,
    passage,
    replace_forward,
)
from gradscope.probes.targets import Target

PEFT_LAYER = "peft.tuners.lora.layer"


def fuse_lora_layers(model: nn.Module, targets: Sequence[Target], collector: Collector) -> Callable[[], None]:
    """Replaces the forward of the model's plain LoRA layers; returns what undoes it.

    The taps on `lora_A` and `lora_B` stay: they are silent while the node runs, and measure when a call is
    left to PEFT's forward (several active adapters, DoRA, merged weights, `adapter_names`, ...).
    """
    peft = sys.modules.get(PEFT_LAYER)
    by_module = {id(target.module): target for target in targets}
    undo = [
        replace_forward(module, FusedLora(module, adapters, collector))
        for module in (model.modules() if peft is not None else ())
        if type(module).forward is peft.Linear.forward
        and "forward" not in module.__dict__
        and is_plain_linear(module.base_layer)
        and (adapters := _plain_adapters(module, by_module))
    ]

    def restore() -> None:
        for each in undo:
            each()

    return restore


@dataclass(frozen=True)
class Adapter:
    """One adapter of a layer: its two factors, as they are tapped."""

    first: Target
    second: Target


def _plain_adapters(layer: Any, targets: Mapping[int, Target]) -> dict[str, Adapter]:
    """Returns the adapters of a layer that are two matrices without bias and nothing else."""
    found = {}
    for name, first in layer.lora_A.items():
        second = layer.lora_B[name]
        known = id(first) in targets and id(second) in targets
        if known and all(is_plain_linear(part) and part.bias is None for part in (first, second)):
            found[name] = Adapter(targets[id(first)], targets[id(second)])
    return found


class FusedLora:
    """Forward of one LoRA layer."""

    def __init__(self, layer: Any, adapters: Mapping[str, Adapter], collector: Collector) -> None:
        self.layer = layer
        self.adapters = dict(adapters)
        self.collector = collector
        self.original = layer.forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what the layer returns, through one node where that is possible."""
        name = None if args or kwargs else self._fusable(x)
        if name is None:
            return self.original(x, *args, **kwargs)
        layer = self.layer
        base, adapter = layer.base_layer, self.adapters[name]
        first, second = adapter.first.module.weight, adapter.second.module.weight
        dtype = compute_type(x, first.dtype)
        noise, dropout = None, layer.lora_dropout[name]
        if dropout.training and not isinstance(dropout, nn.Identity):
            # The factors that dropout draws for the adapter's input: PEFT draws the same numbers.
            noise = dropout(torch.ones_like(x, dtype=first.dtype)).to(dtype)
        call = LoraPassage(
            passage(self.collector, adapter.first, x), adapter, float(layer.scaling[name]), dtype
        )
        return _Lora.apply(x, first, second, base.weight, base.bias, noise, call)

    def _fusable(self, x: torch.Tensor) -> str | None:
        """Returns the adapter that a call with this input goes through alone, if the node can do it."""
        layer = self.layer
        active = layer.active_adapters
        if len(active) != 1 or active[0] not in self.adapters or not torch.is_grad_enabled():
            return None
        if layer.disable_adapters or layer.merged or active[0] in layer.lora_variant:
            return None
        base, adapter = layer.base_layer, self.adapters[active[0]]
        parts = (adapter.first.module, adapter.second.module)
        weights = [part.weight for part in parts]
        differentiable = x.requires_grad or any(weight.requires_grad for weight in weights)
        frozen = not any(parameter.requires_grad for parameter in base.parameters())
        one_type = weights[0].dtype == weights[1].dtype and x.dtype.is_floating_point
        castable = x.dtype == weights[0].dtype or getattr(layer, "cast_input_dtype_enabled", True)
        hooked = base._forward_hooks or base._forward_pre_hooks or any(_hooked(part) for part in parts)
        compiling = torch.compiler.is_compiling()
        usable = differentiable and frozen and one_type and castable and not hooked and not compiling
        return active[0] if usable else None


def _hooked(module: nn.Module) -> bool:
    """Whether someone else's hook wants to see the module called."""
    foreign = [hook for hook in module._forward_hooks.values() if not isinstance(hook, Tap)]
    return bool(foreign or module._forward_pre_hooks)


@dataclass(frozen=True)
class LoraPassage:
    """One call of a LoRA layer; `dtype` is the type of the adapter's products."""

    rows: Passage
    adapter: Adapter
    scaling: float
    dtype: torch.dtype


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
        base_type = compute_type(x, weight.dtype)
        base_input, weight = x.to(base_type), weight.to(base_type)
        y = functional.linear(base_input, weight, None if bias is None else bias.to(base_type))
        first, second = first.to(call.dtype), second.to(call.dtype)
        x_TI = x.reshape(-1, x.shape[-1]).to(call.dtype)
        if noise is not None:
            x_TI = x_TI * noise.view_as(x_TI)
        u_TR = _scaled_product(x_TI, first.t(), call.scaling)
        y_TO = y.view(-1, y.shape[-1])
        if call.dtype == y.dtype:
            y_TO.addmm_(u_TR, second.t())
        else:
            y_TO.add_(u_TR @ second.t())
        kept = narrower(x, base_input)
        ctx.save_for_backward(kept, u_TR, first, second, weight, noise)
        ctx.call, ctx.dtype = call, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, u_TR, first, second, weight, noise = ctx.saved_tensors
        call, (for_x, for_first, for_second, *_) = ctx.call, ctx.needs_input_grad
        dy_TO = gradients[0].reshape(-1, weight.shape[0])
        own_TO = dy_TO.to(call.dtype)
        layer, dx = [], None
        if for_x or for_first:
            v_TR = _scaled_product(own_TO, second, call.scaling)
        if for_x:
            dx = _input_gradient(dy_TO @ weight, v_TR, first, noise).view(x.shape).to(ctx.dtype)
        if for_first:
            x_TI = x.reshape(-1, x.shape[-1]).to(call.dtype)
            if noise is not None:
                x_TI = x_TI * noise.view_as(x_TI)
            layer.append(Factors(call.adapter.first.parameters["weight"], v_TR, x_TI))
        if for_second:
            layer.append(Factors(call.adapter.second.parameters["weight"], own_TO, u_TR))
        found = iter(call.rows.gradients(layer, x) if layer else ())
        d_first = next(found) if for_first else None
        d_second = next(found) if for_second else None
        return dx, d_first, d_second, None, None, None, None


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
    return dx_TI.add_(own_TI if noise is None else own_TI.mul_(noise.view_as(own_TI)))
