"""Weight gradients as products of two factors, cell by cell, straight into the sums.

The gradient of y = x W^T is dW = sum_t dy_t x_t^T over tokens t; the tokens of a cell give its part. On an
accelerator these lines cost more than the products they start, so they are few: one product and one view a
factor, and no work that a micro-batch or an update could do once.

Legend: T tokens, B blocks of tokens (`gradscope.probes.taps.blocks`), L tokens of a block, C cells,
O outputs, I inputs, P numbers of all parameters of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.spans import Span
from gradscope.probes.taps.blocks import BLOCK_NUMBERS, GPU_BLOCK_NUMBERS, Cut

TENSOR_CORE_TYPES = (torch.bfloat16, torch.float16)
"""Types whose products an accelerator adds up, and hands out, in float32."""


class Factors(NamedTuple):
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
        The sum over blocks of each parameter's gradient; None without `totals`.
    """
    span, fresh = into.receive([factors.parameter for factors in layer])
    into.terms.note([(factors.left, factors.right) for factors in layer])
    if not cut.places:
        return [torch.zeros_like(factors.parameter) for factors in layer] if totals else None
    if cut.order is not None:
        layer = [_gather(factors, cut, tokens) for factors in layer]
    if cut.repeats == 1 and fresh and (span.whole is not None or not totals):
        for factors, sum_C in zip(layer, span.parts, strict=True):
            _multiply_blocks(factors, cut, tokens, sum_C)
        return _split(span.whole.sum(0), layer) if totals and span.whole is not None else None
    on_cpu = span.parts[0].device.type == "cpu"
    numbers = sum(factors.parameter.numel() for factors in layer)
    if len(cut.places) * numbers > (BLOCK_NUMBERS if on_cpu else GPU_BLOCK_NUMBERS):
        return _one_by_one(layer, cut, tokens, span, totals=totals)
    parts = span.parts[0].new_empty(len(cut.places), numbers)
    start = 0
    for factors, sum_C in zip(layer, span.parts, strict=True):
        stop = start + factors.parameter.numel()
        view = parts[:, start:stop].view(len(parts), *factors.parameter.shape)
        _multiply_blocks(factors, cut, tokens, view)
        if span.whole is None:
            _reduce(view, cut, sum_C, fresh=fresh)
        start = stop
    if span.whole is not None:
        _reduce(parts, cut, span.whole, fresh=fresh)
    return _split(parts.sum(0), layer) if totals else None


def _gather(factors: Factors, cut: Cut, tokens: int) -> Factors:
    """Returns the factors with rows in the order of the blocks; padding is zero in the narrower one."""
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


def _multiply_blocks(factors: Factors, cut: Cut, tokens: int, out_B: torch.Tensor) -> None:
    """Writes the product of each block, `[B, *shape]`; with steps that of each cell."""
    if cut.steps:
        _add_up(factors, cut, tokens, out_B)
        return
    if cut.rows:
        _multiply(factors, cut.rows * tokens, out_B)
        return
    for index, (start, stop) in enumerate(cut.bounds):
        length = (stop - start) * tokens
        _multiply(_slice(factors, start * tokens, length), length, out_B[index : index + 1])


def _add_up(factors: Factors, cut: Cut, tokens: int, out_C: torch.Tensor) -> None:
    """Writes the products of cells whose rows stand apart, on a CPU."""
    _, left, right = factors
    if right is None:
        out_C.zero_()
        for start, stop, cell, num_cells, _ in cut.steps:
            rows_CLO = left[start * tokens : stop * tokens].reshape(num_cells, -1, left.shape[1])
            out_C[cell : cell + num_cells] += rows_CLO.sum(1, dtype=out_C.dtype)
        return
    wide = _turned(left, right, len(left) // len(out_C))
    one, two = (part.to(out_C.dtype) for part in ((right, left) if wide else (left, right)))
    into_C = out_C.new_empty(len(out_C), one.shape[1], two.shape[1]) if wide else out_C
    for cell in set(cut.places).difference(*(range(step.cell, step.end) for step in cut.steps)):
        into_C[cell].zero_()
    for start, stop, cell, num_cells, first in cut.steps:
        one_CLF = one[start * tokens : stop * tokens].reshape(num_cells, -1, one.shape[1])
        two_CLF = two[start * tokens : stop * tokens].reshape(num_cells, -1, two.shape[1])
        part_C = into_C[cell : cell + num_cells]
        if first:
            torch.bmm(one_CLF.transpose(1, 2), two_CLF, out=part_C)
        else:
            part_C.baddbmm_(one_CLF.transpose(1, 2), two_CLF)
    if wide:
        out_C.copy_(into_C.transpose(1, 2))


def _slice(factors: Factors, start: int, length: int) -> Factors:
    right = None if factors.right is None else factors.right.narrow(0, start, length)
    return Factors(factors.parameter, factors.left.narrow(0, start, length), right)


def _multiply(factors: Factors, length: int, out_B: torch.Tensor) -> None:
    """Writes left^T right of blocks of `length` tokens, in the type of `out_B`."""
    _, left, right = factors
    if right is None:
        torch.sum(left.reshape(-1, length, left.shape[1]), 1, dtype=out_B.dtype, out=out_B)
        return
    num_outputs, num_inputs, dtype = left.shape[1], right.shape[1], out_B.dtype
    on_cpu = not out_B.is_cuda
    if left.dtype != dtype or right.dtype != dtype:
        if not on_cpu and left.dtype == right.dtype and left.dtype in TENSOR_CORE_TYPES:
            left_BOL = left.reshape(-1, length, num_outputs).transpose(1, 2)
            torch.bmm(left_BOL, right.reshape(-1, length, num_inputs), out_dtype=dtype, out=out_B)
            return
        left, right = left.to(dtype), right.to(dtype)
    left_BLO, right_BLI = left.reshape(-1, length, num_outputs), right.reshape(-1, length, num_inputs)
    if on_cpu and _turned(left, right, length):
        out_B.copy_(torch.bmm(right_BLI.transpose(1, 2), left_BLO).transpose(1, 2))
    else:
        torch.bmm(left_BLO.transpose(1, 2), right_BLI, out=out_B)


def _turned(left_TO: torch.Tensor, right_TI: torch.Tensor, length: int) -> bool:
    """Whether a CPU is faster at right^T left, turned round, than at left^T right; `length` tokens a block.

    A product with few rows and many columns runs up to 1.5 times as fast as one the other way; turning the
    result round takes that much where blocks are short.
    """
    num_inputs = right_TI.shape[1]
    return left_TO.shape[1] > num_inputs and length >= 8 * num_inputs


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
    layer: Sequence[Factors], cut: Cut, tokens: int, span: Span, *, totals: bool
) -> list[torch.Tensor] | None:
    """Block after block, for weights so large that the blocks would not fit beside the sums."""
    found = []
    for factors, sum_C in zip(layer, span.parts, strict=True):
        part, added = torch.empty_like(sum_C[:1]), torch.zeros_like(sum_C[0])
        for place, (start, stop) in zip(cut.places, cut.bounds, strict=True):
            length = (stop - start) * tokens
            _multiply(_slice(factors, start * tokens, length), length, part)
            sum_C[place].add_(part[0])
            if totals:
                added.add_(part[0])
        found.append(added)
    return found if totals else None


def _split(total_P: torch.Tensor, layer: Sequence[Factors]) -> list[torch.Tensor]:
    found, start, dtype = [], 0, layer[0].parameter.dtype
    if total_P.dtype != dtype:
        total_P = total_P.to(dtype)  # all at once: the parameters of a layer are mostly of one type
    for parameter, _, _ in layer:
        stop = start + parameter.numel()
        found.append(total_P[start:stop].view(parameter.shape))
        start = stop
    return found
