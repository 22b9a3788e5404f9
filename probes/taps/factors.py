"""Weight gradients as products of two factors, cell by cell, straight into the sums.

The gradient of y = x W^T is dW = sum_t dy_t x_t^T over tokens t; the tokens of a cell give its part.

Legend: T tokens, B blocks of tokens (`gradscope.probes.taps.blocks`), L tokens of a block, C cells,
O outputs, I inputs, P numbers of all parameters of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.taps.blocks import BLOCK_NUMBERS, GPU_BLOCK_NUMBERS, Cut

TENSOR_CORE_TYPES = (torch.bfloat16, torch.float16)
"""Types whose products an accelerator adds up, and hands out, in float32."""


@dataclass(frozen=True)
class Factors:
    """One parameter's gradient: `left^T right`, `[O, I]`, or for a bias the sum of `left` over tokens, `[O]`.

    Attributes:
        parameter: Whose gradient it is.
        left: Gradient of the output, `[T, O]`.
        right: Input, `[T, I]`; None for a bias.
    """

    parameter: nn.Parameter
    left: torch.Tensor
    right: torch.Tensor | None


def total(factors: Factors) -> torch.Tensor:
    """Returns the gradient over all tokens, as autograd computes it."""
    if factors.right is None:
        return factors.left.sum(0)
    return factors.left.t() @ factors.right


def add_factors(
    layer: Sequence[Factors], cut: Cut, into: SlotAccumulators, *, tokens: int, totals: bool
) -> list[torch.Tensor] | None:
    """Adds each cell's gradient of the parameters of one layer to the sums.

    Args:
        layer: The factors of its parameters, over the same tokens.
        cut: The blocks.
        into: The sums of the layer's policy.
        tokens: Tokens of a row.
        totals: Whether to return what all blocks add up to.

    Returns:
        The sum over blocks of each parameter's gradient, in the type of the sums; None without `totals`.
    """
    gathered = [_gather(factors, cut, tokens) for factors in layer]
    numbers = sum(factors.parameter.numel() for factors in layer)
    fresh = all(into.is_fresh(factors.parameter) for factors in layer)
    sums = [into.stacked(factors.parameter) for factors in layer]
    whole = into.span([factors.parameter for factors in layer])
    if cut.repeats == 1 and fresh and (whole is not None or not totals):
        _multiply_blocks(gathered, cut, tokens, sums)
        return _split(whole.sum(0), layer) if totals and whole is not None else None
    limit = BLOCK_NUMBERS if whole is None or whole.device.type == "cpu" else GPU_BLOCK_NUMBERS
    if len(cut.bounds) * numbers > limit:
        return _one_by_one(gathered, cut, tokens, sums, totals=totals)
    parts = sums[0].new_empty(len(cut.bounds), numbers)
    sizes = [factors.parameter.numel() for factors in layer]
    views = [
        columns.view(len(parts), *factors.parameter.shape)
        for columns, factors in zip(parts.split(sizes, dim=1), layer, strict=True)
    ]
    _multiply_blocks(gathered, cut, tokens, views)
    if whole is not None:
        _reduce(parts, cut, whole, fresh=fresh)
    else:
        for view, sum_C in zip(views, sums, strict=True):
            _reduce(view, cut, sum_C, fresh=fresh)
    return _split(parts.sum(0), layer) if totals else None


def _gather(factors: Factors, cut: Cut, tokens: int) -> Factors:
    """Returns the factors with rows in the order of the blocks; padding is zero in the narrower one."""
    if cut.order is None:
        return factors
    left, right = _ordered(factors.left, cut, tokens), factors.right
    if right is not None:
        right = _ordered(right, cut, tokens)
    if cut.filled is not None:
        if right is not None and right.shape[1] < left.shape[1]:
            right = _masked(right, cut.filled, tokens)
        else:
            left = _masked(left, cut.filled, tokens)
    return Factors(factors.parameter, left, right)


def _ordered(x_TF: torch.Tensor, cut: Cut, tokens: int) -> torch.Tensor:
    assert cut.order is not None
    return x_TF.reshape(-1, tokens * x_TF.shape[1]).index_select(0, cut.order).view(-1, x_TF.shape[1])


def _masked(x_TF: torch.Tensor, filled_N1: torch.Tensor, tokens: int) -> torch.Tensor:
    rows = x_TF.view(-1, tokens * x_TF.shape[1])
    return rows.masked_fill(~filled_N1, 0.0).view_as(x_TF)


def _multiply_blocks(layer: Sequence[Factors], cut: Cut, tokens: int, into: Sequence[torch.Tensor]) -> None:
    """Writes the product of each block, `[B, *shape]` for each parameter."""
    for factors, out_B in zip(layer, into, strict=True):
        if cut.rows:
            _multiply(factors, cut.rows * tokens, out_B)
            continue
        for index, (start, stop) in enumerate(cut.bounds):
            length = (stop - start) * tokens
            _multiply(_slice(factors, start * tokens, length), length, out_B[index : index + 1])


def _slice(factors: Factors, start: int, length: int) -> Factors:
    right = None if factors.right is None else factors.right.narrow(0, start, length)
    return Factors(factors.parameter, factors.left.narrow(0, start, length), right)


def _multiply(factors: Factors, length: int, out_B: torch.Tensor) -> None:
    left, right, blocks = factors.left, factors.right, len(out_B)
    left_BLO = left.reshape(blocks, length, left.shape[1])
    if right is None:
        torch.sum(left_BLO, 1, dtype=out_B.dtype, out=out_B)
    else:
        _bmm(left_BLO, right.reshape(blocks, length, right.shape[1]), out_B)


def _bmm(left_BLO: torch.Tensor, right_BLI: torch.Tensor, out_BOI: torch.Tensor) -> None:
    """Writes left^T right in the type of `out_BOI`, of which float32 is exact for the coarser types."""
    if left_BLO.dtype != out_BOI.dtype or right_BLI.dtype != out_BOI.dtype:
        same = left_BLO.dtype == right_BLI.dtype
        if out_BOI.is_cuda and same and left_BLO.dtype in TENSOR_CORE_TYPES:
            torch.bmm(left_BLO.transpose(1, 2), right_BLI, out_dtype=out_BOI.dtype, out=out_BOI)
            return
        left_BLO, right_BLI = left_BLO.to(out_BOI.dtype), right_BLI.to(out_BOI.dtype)
    if out_BOI.device.type == "cpu" and left_BLO.shape[2] > right_BLI.shape[2]:
        # A product with few rows and many columns runs 1.5 times as fast on a CPU as one the other way.
        out_BOI.copy_(torch.bmm(right_BLI.transpose(1, 2), left_BLO).transpose(1, 2))
    else:
        torch.bmm(left_BLO.transpose(1, 2), right_BLI, out=out_BOI)


def _reduce(parts_B: torch.Tensor, cut: Cut, sums_C: torch.Tensor, *, fresh: bool) -> None:
    """Adds blocks to the sums of their cells."""
    if cut.repeats:
        by_cell = parts_B.view(len(sums_C), cut.repeats, *parts_B.shape[1:])
        if fresh:
            torch.sum(by_cell, 1, out=sums_C)
        else:
            sums_C.add_(parts_B if cut.repeats == 1 else by_cell.sum(1))
    elif sums_C.device.type == "cpu":
        # Not straight into the sums: on a CPU, adding rows to a strided view is many times slower.
        sums_C.add_(torch.zeros_like(sums_C).index_add_(0, cut.cells, parts_B))
    else:
        sums_C.index_add_(0, cut.cells, parts_B)


def _one_by_one(
    layer: Sequence[Factors], cut: Cut, tokens: int, sums: Sequence[torch.Tensor], *, totals: bool
) -> list[torch.Tensor] | None:
    """Block after block, for weights so large that the blocks would not fit beside the sums."""
    found = [torch.zeros_like(sum_C[0]) for sum_C in sums] if totals else None
    for index, (factors, sum_C) in enumerate(zip(layer, sums, strict=True)):
        part = torch.empty_like(sum_C[:1])
        for place, (start, stop) in zip(cut.places, cut.bounds, strict=True):
            length = (stop - start) * tokens
            _multiply(_slice(factors, start * tokens, length), length, part)
            sum_C[place].add_(part[0])
            if found is not None:
                found[index].add_(part[0])
    return found


def _split(total_P: torch.Tensor, layer: Sequence[Factors]) -> list[torch.Tensor]:
    sizes = [factors.parameter.numel() for factors in layer]
    return [
        part.view(factors.parameter.shape) for part, factors in zip(total_P.split(sizes), layer, strict=True)
    ]
