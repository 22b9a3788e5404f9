"""`fused`: layers whose weight gradient is the sum of the gradients of the cells, computed once.

A layer's `forward` is replaced by one autograd node. Its backward computes the cells' gradients and hands
their sum to autograd, so that measuring costs no products; weights differ from plain training by the order of
summation. Whatever a node cannot do, it leaves to the layer's own forward and the taps on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.blocks import cut_rows
from gradscope.probes.taps.capture import REENTRANT, Collector
from gradscope.probes.taps.factors import Factors, add_factors, total
from gradscope.probes.taps.products import is_packed
from gradscope.probes.taps.whole import check_policy
from gradscope.probes.targets import Target

Add = Callable[[RowBatch, SlotAccumulators, bool], list[torch.Tensor] | None]


class Passage(NamedTuple):
    """One call of a fused layer: what its backward needs to know beside tensors.

    A named tuple, as one is made for each layer and pass.

    Attributes:
        collector: Where gradients go.
        target: The layer, or the first of its parts.
        policy: The policy of its parameters.
        batch: The rows that went through; None outside `rows` blocks.
        rows_unknown: Whether the forward ran inside a backward, so that nobody knows whose rows they were.
    """

    collector: Collector
    target: Target
    policy: str
    batch: RowBatch | None
    rows_unknown: bool

    def gradients(self, layer: Sequence[Factors], x: torch.Tensor) -> list[torch.Tensor]:
        """Adds the cells' gradients to the sums and returns their sum for each parameter; never raises.

        Args:
            layer: The factors of the parameters that take part.
            x: The layer's input.
        """
        found = self.collect(layer, x, totals=True)
        if found is None:
            found = [total(factors) for factors in layer]
        return [
            cast(gradient, factors.parameter.dtype) for gradient, factors in zip(found, layer, strict=True)
        ]

    def collect(
        self, layer: Sequence[Factors], x: torch.Tensor, *, totals: bool
    ) -> list[torch.Tensor] | None:
        """Adds the cells' gradients to the sums; never raises.

        Returns:
            Their sum for each parameter, with `totals` and where every row belongs to a slot.
        """
        parameters = [factors.parameter for factors in layer]

        def add(batch: RowBatch, into: SlotAccumulators, totals: bool) -> list[torch.Tensor] | None:
            return _add_layer(layer, batch, into, totals=totals)

        return self.measure(parameters, x, {factors.left.dtype for factors in layer}, add, totals=totals)

    def measure(
        self,
        parameters: Sequence[nn.Parameter],
        x: torch.Tensor,
        dtypes: Iterable[torch.dtype],
        add: Add,
        *,
        totals: bool,
    ) -> list[torch.Tensor] | None:
        """Has something add the cells' gradients of the layer's parameters to the sums; never raises.

        Args:
            parameters: Those that take part.
            x: The layer's input.
            dtypes: Types that went into the gradients.
            add: Adds the gradients of rows to sums; returns their total where it is asked for and known.
            totals: Whether it is.
        """
        if self.collector.failure is not None or (self.batch is None and not self.rows_unknown):
            return None
        begin, found = time.perf_counter(), None
        try:
            batch, into = self._checked(x)
            for dtype in dtypes:
                into.note_precision(dtype)
            found = add(batch, into, totals)
            if self.collector.row_meter is not None:
                self.collector.row_meter.add(batch, parameters, lambda rows, sums: add(rows, sums, False))
        except Exception as error:  # raised by step(), never inside a backward
            self.collector.fail(
                str(error) if isinstance(error, ProbeError) else f"{self.target.name}: {error!r}"
            )
        self.collector.seconds += time.perf_counter() - begin
        return found

    def _checked(self, x: torch.Tensor) -> tuple[RowBatch, SlotAccumulators]:
        """Returns the rows of the call, which fit its input and its policy, and the sums."""
        if self.rows_unknown or self.batch is None:
            raise ProbeError(REENTRANT.format(name=self.target.name))
        into = self.collector.sums[self.policy]
        is_packed(self.target, self.batch, x)
        check_policy([self.batch], into)
        return self.batch, into


def _add_layer(
    layer: Sequence[Factors], batch: RowBatch, into: SlotAccumulators, *, totals: bool
) -> list[torch.Tensor] | None:
    left = layer[0].left
    tokens = len(left) // len(batch)
    numbers = sum(factors.parameter.numel() for factors in layer)
    cut = cut_rows(batch, into.cells, left.device, tokens=tokens, numbers=numbers)
    # Rows of no slot count in the weight gradient alone.
    return add_factors(layer, cut, into, tokens=tokens, totals=totals and cut.complete)


def passage(collector: Collector, target: Target, policy: str, x: torch.Tensor) -> Passage:
    """Returns what a call of a fused layer now has to know; its rows count as seen."""
    batch = collector.rows
    if batch is not None:
        batch.see(x.shape[:-1])
        batch.tapped = True
    return Passage(collector, target, policy, batch, collector.rows_unknown)


def compute_type(x: torch.Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Returns the type in which a layer multiplies `x`: that of autocast, or the type that is given."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (x.dtype, otherwise):
        return torch.get_autocast_dtype(kind)
    return otherwise


class FusedLinear:
    """Forward of an `nn.Linear` that is trained: the same products, one backward."""

    def __init__(self, target: Target, collector: Collector) -> None:
        self.target = target
        self.collector = collector
        self.policy = target.policy

    @torch.compiler.disable
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Returns what the layer returns; with gradients, through one node of the graph."""
        module: Any = self.target.module
        if not self._differentiable(input):
            batch = self.collector.rows
            if batch is not None:
                batch.see(input.shape[:-1])  # rows count whether or not a backward comes
            return functional.linear(input, module.weight, module.bias)
        call = passage(self.collector, self.target, self.policy, input)
        return _Linear.apply(input, module.weight, module.bias, call)

    def _differentiable(self, x: torch.Tensor) -> bool:
        own = (p for p in self.target.parameters.values() if p.requires_grad)
        return torch.is_grad_enabled() and (x.requires_grad or next(own, None) is not None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Passage
    ) -> torch.Tensor:
        dtype = compute_type(x, weight.dtype)
        x_cast, weight_cast = cast(x, dtype), cast(weight, dtype)
        ctx.save_for_backward(narrower(x, x_cast), weight_cast)
        ctx.call, ctx.dtype = call, x.dtype
        return functional.linear(x_cast, weight_cast, None if bias is None else cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        dy = gradients[0].reshape(-1, weight.shape[0])
        dx = cast((dy @ weight).view(x.shape), ctx.dtype) if for_x else None
        own = ctx.call.target.parameters
        layer = []
        if for_weight:
            layer.append(Factors(own["weight"], dy, cast(x.reshape(-1, x.shape[-1]), dy.dtype)))
        if for_bias:
            layer.append(Factors(own["bias"], dy, None))
        found = iter(ctx.call.gradients(layer, x) if layer else ())
        return dx, next(found) if for_weight else None, next(found) if for_bias else None, None


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in a type; the call that does nothing is left out, which would cost a microsecond."""
    return x if x.dtype == dtype else x.to(dtype)


def narrower(x: torch.Tensor, x_cast: torch.Tensor) -> torch.Tensor:
    """Returns the one of a tensor and its cast that takes less memory to keep; `x` when equal."""
    return x_cast if x_cast.element_size() < x.element_size() else x


def replace_forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """Gives a module another forward; returns what gives the old one back."""
    assert "forward" not in module.__dict__
    module.__dict__["forward"] = forward
    return lambda: module.__dict__.pop("forward", None)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is torch's own linear layer with the forward of its class."""
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
