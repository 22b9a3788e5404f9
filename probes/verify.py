"""Compares the row split of one slot with an ordinary backward of a loss in which only its rows count.

Legend: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.capture import Collector


@dataclass(frozen=True)
class Verification:
    """A comparison that came out well.

    Attributes:
        slot: The slot that was compared.
        relative_error: Norm of the difference over the larger of the two norms; NaN when both gradients are
            zero, so that nothing could be compared.
        tolerance: Largest error that is put down to rounding.
    """

    slot: str
    relative_error: float
    tolerance: float


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gives a block a model without gradients and puts gradients and random numbers back as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        _clear(model)
        with _same_randomness(model):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def compare_with_masked_loss(
    model: nn.Module,
    loss_of_rows: Callable[[torch.Tensor], torch.Tensor],
    truth: RowBatch,
    slot: int | None,
    collector: Collector,
) -> Verification:
    """Runs the loss of all rows, then of one slot's with the same random numbers; compares gradients.

    Args:
        model: The probed model; its gradients are overwritten.
        loss_of_rows: Loss of the rows of a mask, announcing its rows itself.
        truth: The slot of each entry of the mask.
        slot: The slot to compare; None for the one with the largest gradient.
        collector: The scope's collector, holding empty sums.

    Raises:
        ProbeError: The gradients differ, the loss cannot be differentiated, or nothing was measured.
    """
    slot_N = torch.tensor(truth.slot_N)
    with _same_randomness(model):
        _backward(loss_of_rows, torch.ones_like(slot_N, dtype=torch.bool))
    if collector.failure is not None:
        raise ProbeError(f"verify(): {collector.failure}")
    if all(sums.empty for sums in collector.sums.values()):
        raise ProbeError(
            "verify(): nothing was measured; loss_of_rows must run the model inside scope.rows(...)."
        )
    chosen = _largest(collector, truth) if slot is None else slot
    sums = next(sums for sums in collector.sums.values() if chosen in sums.policy.slots)
    split, left_out = sums.gradients(sums.policy.slots.index(chosen)), frozenset(sums.left_out)
    _clear(model)
    with _same_randomness(model):
        _backward(loss_of_rows, slot_N == chosen)
    return _judge(truth.names[chosen], split, sums, left_out)


def _judge(
    slot: str, split: dict[str, torch.Tensor], sums: SlotAccumulators, left_out: frozenset[int]
) -> Verification:
    gap_square, split_square, masked_square, worst = 0.0, 0.0, 0.0, ("", -1.0)
    for name, parameter in sums.policy.covered.items():
        if id(parameter) in left_out:
            continue
        masked = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gap = float(torch.linalg.vector_norm(split[name].double() - masked.double())) ** 2
        worst = max(worst, (name, gap), key=lambda item: item[1])
        gap_square += gap
        split_square += float(torch.linalg.vector_norm(split[name].double())) ** 2
        masked_square += float(torch.linalg.vector_norm(masked.double())) ** 2
    larger = max(split_square, masked_square)
    error = math.sqrt(gap_square / larger) if larger > 0 else math.nan
    tolerance = math.sqrt(sums.eps)
    if error > tolerance:
        raise ProbeError(
            f"verify(): the gradient measured for slot '{slot}' differs by {error:.2g} of its norm from that "
            f"of a loss with its rows alone (allowed {tolerance:.1g}), most at '{worst[0]}'. Either rows() "
            "was given other slots than the rows have, or the slot's loss depends on rows of other slots "
            "(attention across packed rows, a term over the batch)."
        )
    return Verification(slot, error, tolerance)


def _backward(loss_of_rows: Callable[[torch.Tensor], torch.Tensor], mask_N: torch.Tensor) -> None:
    loss = loss_of_rows(mask_N)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ProbeError(
            f"verify(): loss_of_rows returned {type(loss).__name__} instead of a loss, one number that "
            "backward() can start from; return (losses_of_rows * mask).sum() or the like."
        )
    loss.backward()


def _largest(collector: Collector, truth: RowBatch) -> int:
    """Returns the slot with rows whose gradient is largest, so that the comparison has most to compare."""
    norms: dict[int, float] = {}
    for sums in collector.sums.values():
        if not sums.empty:
            squares = np.diag(sums.summarise().gram)
            norms.update(zip(sums.policy.slots, squares.tolist(), strict=True))
    present = [slot for slot in norms if slot in truth.slots]
    if not present:
        raise ProbeError(
            "verify(): no slot of slot_of_each_row was measured; its rows never entered scope.rows(...)."
        )
    return max(present, key=lambda slot: norms[slot])


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _same_randomness(model: nn.Module) -> Iterator[None]:
    """Restores torch's random state of the CPU and of the model's devices on leaving."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        yield
