"""Taps on modules: an identity in the graph that computes slot gradients when the backward passes by.

Autograd keeps computing its own weight gradient, so `.grad` is bitwise what it is without taps. The input is
kept by `save_for_backward`, never by a closure, so that activation checkpointing and offloading keep working;
a tap is placed whether or not rows are announced, so that a recomputed forward saves as many tensors as the
first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.products import add_products, row_axes
from gradscope.probes.targets import Target

REENTRANT = (
    "{name}: its forward ran inside a backward pass, so the rows it belongs to are unknown (reentrant "
    "activation checkpointing). Use use_reentrant=False, or call gradient_checkpointing_enable() before "
    "attach()."
)


class Collector:
    """What the taps of one scope share: the rows now in the model, where sums go, and the first failure.

    Attributes:
        batch: Rows of the micro-batch in the forward pass; None outside `rows` blocks.
        recomputed: Rows of a checkpointed stretch that is being recomputed; None elsewhere.
        sums: Accumulators by policy.
        failure: Why collecting stopped; None while all is well.
        seconds: Host time spent on slot gradients inside backward passes.
    """

    def __init__(self, sums: Mapping[str, SlotAccumulators]) -> None:
        self.batch: RowBatch | None = None
        self.recomputed: RowBatch | None = None
        self.sums = dict(sums)
        self.failure: str | None = None
        self.seconds = 0.0

    def fail(self, message: str) -> None:
        """Stops collecting; the first message is the one that `step` raises."""
        self.failure = self.failure or message


class Tap:
    """Forward hook of one module."""

    def __init__(self, target: Target, collector: Collector) -> None:
        self.target = target
        self.collector = collector

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the module's output with the tap behind it; None (output unchanged) without gradients."""
        batch = self.collector.recomputed or self.collector.batch
        differentiable = torch.is_grad_enabled() and output.requires_grad
        if batch is None and not differentiable:
            return None
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        if batch is not None:
            batch.see(row_axes(self.target, x))  # rows count whether or not a backward comes
        if not differentiable:
            return None
        wanted = {name: p for name, p in self.target.parameters.items() if p.requires_grad}
        if not wanted:
            return None
        if self.target.kind == "linear" and x.dtype != output.dtype:
            x = x.to(output.dtype)  # what autograd multiplies under autocast
        if batch is not None:
            batch.tapped = True
        rows_unknown = self.collector.recomputed is None and torch._C._current_graph_task_id() != -1
        return _Identity.apply(output, x, self, batch, wanted, rows_unknown)

    def collect(
        self,
        batch: RowBatch,
        wanted: Mapping[str, nn.Parameter],
        x: torch.Tensor,
        dy: torch.Tensor,
        rows_unknown: bool,
    ) -> None:
        """Adds the slot gradients of one call of the module; never raises."""
        if self.collector.failure is not None:
            return
        begin = time.perf_counter()
        try:
            if rows_unknown:
                raise ProbeError(REENTRANT.format(name=self.target.name))
            add_products(self.target, wanted, batch, self.collector.sums[self.target.policy], x, dy)
        except Exception as error:  # raised by step(), never inside a backward
            self.collector.fail(
                str(error) if isinstance(error, ProbeError) else f"{self.target.name}: {error!r}"
            )
        self.collector.seconds += time.perf_counter() - begin


class _Identity(torch.autograd.Function):
    """Hands the output on and, in the backward, the gradient; on its way the tap sees it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, x: torch.Tensor, *details: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.details = details
        ctx.set_materialize_grads(False)
        # Detached, not returned as it is: a view made here would forbid in-place operations on the output.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (dy,) = gradients
        tap, batch, wanted, rows_unknown = ctx.details
        if dy is not None and (batch is not None or rows_unknown):
            tap.collect(batch, wanted, ctx.saved_tensors[0], dy.detach(), rows_unknown)
        return dy, None, None, None, None, None
