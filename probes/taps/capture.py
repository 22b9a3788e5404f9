"""Taps on modules: an identity in the graph that computes slot gradients when the backward passes by.

Autograd keeps computing its own weight gradient, so `.grad` is bitwise what it is without taps. The input is
kept by `save_for_backward`, never by a closure, so that activation checkpointing and offloading keep working;
a tap is placed whether or not rows are announced, so that a recomputed forward saves as many tensors as the
first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.evidence.row_meter import RowMeter
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.lora_embedding import takes_part
from gradscope.probes.taps.products import add_products, row_axes
from gradscope.probes.targets import Target

REENTRANT = (
    "{name}: its forward ran inside a backward pass, so the rows it belongs to are unknown (reentrant "
    "activation checkpointing by another function than torch's). Use torch.utils.checkpoint, best with "
    "use_reentrant=False."
)


class Collector:
    """What the taps of one scope share: the rows now in the model, where sums go, and the first failure.

    Attributes:
        batch: Rows of the micro-batch in the forward pass; None outside `rows` blocks.
        sums: Accumulators by policy.
        arrivals: Rows whose outputs a backward pass has come through, by its number; and whether the forward
            pass ran where its rows could not be known.
        row_meter: Measures rows one by one; None while nobody asks for that.
        failure: Why collecting stopped; None while all is well.
        suspicions: Numbers on the device that must be zero, with what it means when they are not.
        looked_at: The rows whose attention was looked at last.
        seconds: Host time spent on slot gradients inside backward passes.
    """

    def __init__(self, sums: Mapping[str, SlotAccumulators]) -> None:
        self.batch: RowBatch | None = None
        self.sums = dict(sums)
        self.arrivals: dict[int, set[tuple[RowBatch | None, bool]]] = {}
        self.row_meter: RowMeter | None = None
        self.failure: str | None = None
        self.suspicions: list[tuple[torch.Tensor, str]] = []
        self.looked_at: RowBatch | None = None
        self.seconds = 0.0
        self._recomputed: list[RowBatch | None] = []

    @property
    def rows(self) -> RowBatch | None:
        """Rows of the forward pass that runs now: those of a checkpointed stretch while it is recomputed."""
        return self._recomputed[-1] if self._recomputed else self.batch

    @property
    def rows_unknown(self) -> bool:
        """Whether a forward pass that runs now is inside a backward pass without anybody having said why."""
        return not self._recomputed and torch._C._current_graph_task_id() != -1

    @contextmanager
    def recomputing(self, rows: RowBatch | None) -> Iterator[None]:
        """Says for the duration of a block that forward passes are those of earlier rows, run again."""
        self._recomputed.append(rows)
        try:
            yield
        finally:
            self._recomputed.pop()

    def fail(self, message: str) -> None:
        """Stops collecting; the first message is the one that `step` raises."""
        self.failure = self.failure or message

    def suspect(self, bad: torch.Tensor | bool, message: str) -> None:
        """Keeps what may be wrong, without waiting for the device that knows."""
        self.suspicions.append((torch.as_tensor(bad), message))

    def settle(self) -> None:
        """Reads the suspicions, in one copy from each device; the first that holds is a failure."""
        found, self.suspicions = self.suspicions, []
        by_device: dict[torch.device, list[int]] = {}
        for place, (bad, _) in enumerate(found):
            by_device.setdefault(bad.device, []).append(place)
        held: set[int] = set()
        for places in by_device.values():
            flags = torch.stack([found[place][0].reshape(()).bool() for place in places]).tolist()
            held.update(place for place, flag in zip(places, flags, strict=True) if flag)
        if held:
            self.fail(found[min(held)][1])


class Tap:
    """Forward hook of one module."""

    def __init__(self, target: Target, collector: Collector) -> None:
        self.target = target
        self.collector = collector

    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the module's output with the tap behind it; None (output unchanged) without gradients."""
        batch = self.collector.rows
        differentiable = torch.is_grad_enabled() and output.requires_grad
        if batch is None and not differentiable:
            return None
        x, *others = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if others and self.target.claim.kind == "affine":
            self.collector.fail(
                f"{self.target.name}: {type(module).__name__} was called with {1 + len(others)} tensors, so "
                "that its gradient does not follow from the first; freeze its parameters, or use mode 'pure'."
            )
        x = x.detach()
        if batch is not None:
            batch.see(row_axes(self.target, x))  # rows count whether or not a backward comes
        if not differentiable:
            return None
        wanted = {name: p for name, p in self.target.parameters.items() if self._takes_part(name, p)}
        if not wanted:
            return None
        if self.target.claim.kind in ("linear", "transposed") and x.dtype != output.dtype:
            x = x.to(output.dtype)  # what autograd multiplies under autocast
        if batch is not None:
            batch.tapped = True
        return _Identity.apply(output, x, self, batch, wanted, self.collector.rows_unknown)

    def _takes_part(self, name: str, parameter: nn.Parameter) -> bool:
        if self.target.claim.kind == "lora_embedding" and not takes_part(self.target.module, name):
            return False
        return parameter.requires_grad

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
            sums_of = {name: self.collector.sums[self.target.policies[name]] for name in wanted}
            add_products(self.target, wanted, batch, sums_of, x, dy)
            if self.collector.row_meter is not None:
                self.collector.row_meter.add(
                    batch,
                    wanted.values(),
                    lambda rows, into: add_products(
                        self.target, wanted, rows, dict.fromkeys(wanted, into), x, dy
                    ),
                )
        except Exception as error:  # raised by step(), never inside a backward
            self.collector.fail(
                str(error) if isinstance(error, ProbeError) else f"{self.target.name}: {error!r}"
            )
        self.collector.seconds += time.perf_counter() - begin


def place_tap(target: Target, collector: Collector) -> RemovableHandle:
    """Puts a tap on a module."""
    return target.module.register_forward_hook(Tap(target, collector), with_kwargs=True)


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
