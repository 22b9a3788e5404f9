"""Compares the row split of slots with an ordinary backward of a loss in which only one's rows count.

Legend: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.reduction import Reduction
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.capture import Collector


@dataclass(frozen=True)
class Verification:
    """Comparisons that came out well.

    Attributes:
        errors: Slot -> norm of the difference over the larger of the two norms; NaN when both gradients are
            zero, so that nothing could be compared.
        tolerance: Largest error that is put down to rounding.
    """

    errors: dict[str, float]
    tolerance: float

    @property
    def slot(self) -> str:
        """The slot with the largest error."""
        return max(self.errors, key=lambda slot: (self.errors[slot] >= 0, self.errors[slot]))

    @property
    def relative_error(self) -> float:
        """The largest error; NaN where nothing could be compared."""
        return self.errors[self.slot]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gives a block a model without gradients and puts gradients and random numbers back as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Copies too: a data-parallel wrapper may give the next backward the same memory.
    kept = [(gradient, gradient.clone()) for _, gradient in gradients if gradient is not None]
    try:
        _clear(model)
        with same_randomness(model):
            yield
    finally:
        for kept_gradient, values in kept:
            kept_gradient.copy_(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def compare_with_masked_loss(
    model: nn.Module,
    loss_of_rows: Callable[[torch.Tensor], torch.Tensor],
    truth: RowBatch,
    slot: int | None,
    collector: Collector,
    find_reduction: Callable[[], Reduction],
) -> Verification:
    """Runs the loss of all rows, then of each slot's with the same random numbers; compares gradients.

    Args:
        model: The probed model; its gradients are overwritten.
        loss_of_rows: Loss of the rows of a mask, announcing its rows itself.
        truth: The slot of each entry of the mask.
        slot: The slot to compare; None for all that have rows, one more pass each.
        collector: The scope's collector, holding empty sums.
        find_reduction: Finds out how the work is shared, once a forward pass was run.

    Raises:
        ProbeError: The gradients differ, the loss cannot be differentiated, or nothing was measured.
    """
    slot_N = torch.tensor(truth.slot_N)
    with same_randomness(model):
        _backward(loss_of_rows, torch.ones_like(slot_N, dtype=torch.bool))
    reduction = find_reduction()
    reduction.together(lambda: _check_collected(collector))
    chosen = _choose(collector, truth, slot, reduction)
    sums_of = {one: sums for one in chosen for sums in collector.sums.values() if one in sums.policy.slots}
    splits = {one: _pieces(sums_of[one], one) for one in chosen}  # the next pass adds to the sums
    errors, tolerance = {}, 0.0
    for one, split in splits.items():
        _clear(model)
        with same_randomness(model):
            _backward(loss_of_rows, slot_N == one)
        tolerance = math.sqrt(sums_of[one].eps)
        errors[truth.names[one]] = _judge(truth.names[one], split, sums_of[one], tolerance)
    return Verification(errors, tolerance)


def _check_collected(collector: Collector) -> None:
    if collector.failure is not None:
        raise ProbeError(f"verify(): {collector.failure}")


def _pieces(sums: SlotAccumulators, slot: int) -> dict[str, torch.Tensor]:
    """Returns the numbers of a slot's gradient that this process accounts for, by covered parameter."""
    cells, pieces = sums.cells.of_slot(sums.policy.slots.index(slot)), {}
    for block in sums.local_blocks():
        parameters = [sums.policy.covered[name] for name in block.names]
        sizes = [sums.reduction.local(parameter).numel() for parameter in parameters]
        own = block.sums[cells].sum(0).split(sizes)
        for name, parameter, piece in zip(block.names, parameters, own, strict=True):
            if id(parameter) not in sums.left_out:
                pieces[name] = piece
    return pieces


def _judge(slot: str, split: Mapping[str, torch.Tensor], sums: SlotAccumulators, tolerance: float) -> float:
    squares = []
    for name, piece in split.items():
        gradient = sums.policy.covered[name].grad
        found = piece.double()
        masked = torch.zeros_like(found) if gradient is None else sums.reduction.local(gradient).double()
        squares.append(torch.stack([part.square().sum() for part in (found - masked, found, masked)]).cpu())
    squares_N3 = sums.reduction.add_up(torch.stack(squares))
    gap_square, split_square, masked_square = squares_N3.sum(0).tolist()
    larger = max(split_square, masked_square)
    error = math.sqrt(gap_square / larger) if larger > 0 else math.nan
    if error > tolerance:
        worst = list(split)[int(squares_N3[:, 0].argmax())]
        raise ProbeError(
            f"verify(): the gradient measured for slot '{slot}' differs by {error:.2g} of its norm from that "
            f"of a loss with its rows alone (allowed {tolerance:.1g}), most at '{worst}'. Either rows() "
            "was given other slots than the rows have, or the slot's loss depends on rows of other slots "
            "(attention across packed rows, a term over the batch)."
        )
    return error


def _backward(loss_of_rows: Callable[[torch.Tensor], torch.Tensor], mask_N: torch.Tensor) -> None:
    loss = loss_of_rows(mask_N)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ProbeError(
            f"verify(): loss_of_rows returned {type(loss).__name__} instead of a loss, one number that "
            "backward() can start from; return (losses_of_rows * mask).sum() or the like."
        )
    loss.backward()


def _choose(collector: Collector, truth: RowBatch, slot: int | None, reduction: Reduction) -> list[int]:
    """Returns the slots to compare: the given one, or all with rows, in their order.

    Raises:
        ProbeError: It has no rows, or nothing was measured on any process.
    """
    present = frozenset().union(*reduction.gather(truth.slots))
    if slot is not None and slot not in present:
        raise ProbeError(f"verify(): slot '{truth.names[slot]}' has no rows among those given.")
    filled = reduction.gather([name for name, sums in collector.sums.items() if not sums.empty])
    measured = {
        one
        for name, sums in collector.sums.items()
        if any(name in names for names in filled)
        for one in sums.policy.slots
    }
    if not measured:
        raise ProbeError(
            "verify(): nothing was measured; loss_of_rows must run the model inside scope.rows(...)."
        )
    if not measured & present:
        raise ProbeError(
            "verify(): no slot of slot_of_each_row was measured; its rows never entered scope.rows(...)."
        )
    return sorted(measured & present) if slot is None else [slot]


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def same_randomness(model: nn.Module) -> Iterator[None]:
    """Restores torch's random state of the CPU and of the model's devices on leaving."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        yield
