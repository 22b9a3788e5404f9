"""A trained norm as one autograd node, whose weight gradient is the sum of the gradients of the cells.

For y = w h with h = x r and r = 1 / sqrt(mean x^2 + eps), one product q = dy x serves all: the gradient of w
is sum_t r_t q_t, and dx = r (w dy) - x r^3 (q w) / D.

Legend: T tokens, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.by_cell import all_in_cells, sum_by_cell
from gradscope.probes.taps.capture import Collector, Tap
from gradscope.probes.taps.fused import Passage, cast, passage
from gradscope.probes.taps.norms import root_mean_square
from gradscope.probes.targets import RootMeanSquare, Target


def fusable_norm(target: Target) -> bool:
    """Whether a target is a norm that a node can stand for."""
    affine, module = target.claim.affine, target.module
    return affine is not None and affine.formula is not None and "forward" not in module.__dict__


class FusedNorm:
    """Forward of a norm; calls that the node does not know go to the norm's own forward and the tap."""

    def __init__(self, target: Target, collector: Collector) -> None:
        affine = target.claim.affine
        assert affine is not None
        assert affine.formula is not None
        self.target = target
        self.collector = collector
        self.policy = target.policy
        self.formula: RootMeanSquare = affine.formula
        self.original = target.module.forward
        self.tap = Tap(target, collector)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns what the norm returns; with gradients, through one node of the graph."""
        module, weight = self.target.module, self.target.module._parameters["weight"]
        if len(args) == 1 and not kwargs and weight is not None and self._knows(args[0], weight):
            call = passage(self.collector, self.target, self.policy, args[0])
            return _Norm.apply(args[0], weight, self.formula.eps, call)
        output: torch.Tensor = self.original(*args, **kwargs)
        tapped = self.tap(module, args, kwargs, output)
        return output if tapped is None else tapped

    def _knows(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        if x.is_cuda and isinstance(self.target.module, nn.RMSNorm):
            return False  # torch has one kernel for it
        return torch.is_grad_enabled() and weight.requires_grad and x.dtype in self.formula.dtypes


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, call: Passage) -> torch.Tensor:
        y, factor = root_mean_square(x, weight, eps)
        ctx.save_for_backward(x, weight, factor)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        call: Passage = ctx.call
        inner = factor.dtype
        x_TD, r_T1 = cast(x.reshape(-1, x.shape[-1]), inner), factor.view(-1, 1)
        dy_TD = cast(gradients[0].reshape(x_TD.shape), inner)
        q_TD, dx = dy_TD * x_TD, None
        if ctx.needs_input_grad[0]:
            w_D = cast(weight, inner)
            along_T1 = (q_TD @ w_D).div_(len(w_D)).unsqueeze(1).mul_(r_T1.pow(3))
            dx = (dy_TD * w_D).mul_(r_T1).addcmul_(x_TD, along_T1, value=-1)
            dx = cast(dx.view(x.shape), x.dtype)
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        own = call.target.parameters["weight"]

        def add(batch: RowBatch, into: SlotAccumulators, totals: bool) -> list[torch.Tensor] | None:
            parts = sum_by_cell(q_TD, r_T1, batch, into.cells)
            into.stacked(own).add_(parts)
            return [parts.sum(0)] if totals and all_in_cells(batch, into.cells) else None

        found = call.measure([own], x, [gradients[0].dtype], add, totals=True)
        total = (q_TD * r_T1).sum(0) if found is None else found[0]
        return dx, cast(total, weight.dtype), None, None
