"""Slot gradients of one module's parameters from its input and the gradient of its output.

For a linear layer y = x W^T the gradient is a sum over rows, dW = sum_t dy_t x_t^T, so the rows of cell k
give g_k exactly and sum_k g_k = dW. The other kinds are sums over rows in the same way.

Legend: N tagged rows, S tokens of a row as the module sees it, T = N S, C cells (`gradscope.probes.cells`),
I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch, RowPlan
from gradscope.probes.taps.blocks import cut_rows
from gradscope.probes.taps.factors import Factors, add_factors
from gradscope.probes.taps.lora_embedding import add_lora_embedding
from gradscope.probes.taps.norms import add_affine
from gradscope.probes.taps.whole import add_whole, check_policy
from gradscope.probes.targets import Target


def add_products(
    target: Target,
    wanted: Mapping[str, nn.Parameter],
    batch: RowBatch,
    sums_of: Mapping[str, SlotAccumulators],
    x: torch.Tensor,
    dy: torch.Tensor,
) -> None:
    """Adds each slot's gradient of the `wanted` parameters of a module to the sums.

    Args:
        target: The module.
        wanted: The parameters that take part, by their name in the module.
        batch: The rows that went through it.
        sums_of: The sums that each of them goes to.
        x: Its input, `[N, ...]`, or `[1, N, ...]` when tokens of packed rows are tagged.
        dy: Gradient of its output, with the same leading axes.

    Raises:
        ProbeError: The input has not one row for each tag, or rows belong to slots of another policy.
    """
    kind = target.claim.kind
    if kind == "embedding" and batch.shared(x.shape):
        _shared_embedding(wanted["weight"], batch, sums_of["weight"], x, dy)
        return
    packed = is_packed(target, batch, x)
    for into in {id(sums): sums for sums in sums_of.values()}.values():
        check_policy([batch], into)
        into.note_precision(dy.dtype)
    if packed:
        x, dy = x[0], dy[0]
    if kind == "lora_embedding":
        add_lora_embedding(target.module, wanted, batch, sums_of, x, dy)
        return
    into = sums_of[next(iter(wanted))]
    if kind == "embedding":
        _embedding(target.module, wanted, batch, into, x, dy)
    elif target.claim.affine is not None:
        add_affine(target.module, target.claim.affine, wanted, batch, into, x, dy)
    else:
        _linear(wanted, batch, into, x, dy, transposed=kind == "transposed")


def row_axes(target: Target, x: torch.Tensor) -> tuple[int, ...]:
    """Returns the sizes of the axes of a module's input that count rows and tokens, not features."""
    feature_axes = 1
    if target.claim.kind in ("embedding", "lora_embedding"):
        feature_axes = 0
    elif target.claim.kind == "affine":
        feature_axes = next(iter(target.parameters.values())).dim()
    return tuple(x.shape[: x.dim() - feature_axes])


def is_packed(target: Target, batch: RowBatch, x: torch.Tensor) -> bool:
    """Returns whether a module's input holds packed rows, of which each token is tagged.

    Raises:
        ProbeError: The input has not one row for each tag.
    """
    packed = batch.see(row_axes(target, x))
    if packed is not None:
        return packed
    raise ProbeError(
        f"{target.name}: the input has shape {list(x.shape)}, but {len(batch)} rows were announced; expected "
        f"[{len(batch)}, ...], or [1, {len(batch)}, ...] with one slot for each token. Give rows() one slot "
        "for each row that enters the model, in the same order."
    )


def _ordered(tensor: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    return tensor if plan.order is None else tensor.index_select(0, plan.order)


def _linear(
    wanted: Mapping[str, nn.Parameter],
    batch: RowBatch,
    into: SlotAccumulators,
    x: torch.Tensor,
    dy: torch.Tensor,
    *,
    transposed: bool,
) -> None:
    x_TI, dy_TO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    tokens = len(x_TI) // len(batch)
    left, right = (x_TI, dy_TO) if transposed else (dy_TO, x_TI)
    layer = [
        Factors(p, left, right) if name == "weight" else Factors(p, dy_TO, None) for name, p in wanted.items()
    ]
    numbers = sum(parameter.numel() for parameter in wanted.values())
    cut = cut_rows(batch, into.cells, x.device, tokens=tokens, numbers=numbers)
    add_factors(layer, cut, into, tokens=tokens, totals=False)


def _shared_embedding(
    weight: nn.Parameter, batch: RowBatch, into: SlotAccumulators, ids: torch.Tensor, dy: torch.Tensor
) -> None:
    """Positions that one row stands for: autograd hands out the sum over all rows."""
    dy_TO = dy.flatten(0, -2).to(into.separate(weight)[0].dtype)
    gradient = dy_TO.new_zeros(weight.shape).index_add_(0, ids.flatten(), dy_TO)
    add_whole(into, weight, [batch], gradient)


def _embedding(
    module: nn.Module,
    wanted: Mapping[str, nn.Parameter],
    batch: RowBatch,
    into: SlotAccumulators,
    ids: torch.Tensor,
    dy: torch.Tensor,
) -> None:
    weight = wanted["weight"]
    plan = batch.plan(into.cells, dy.device)
    ids_NS = _ordered(ids, plan).reshape(len(batch), -1)
    dy_NSO = _ordered(dy, plan).reshape(len(batch), -1, dy.shape[-1])
    padding = module.padding_idx
    if isinstance(padding, int):  # its row has no gradient
        dy_NSO = dy_NSO.masked_fill(torch.eq(ids_NS, padding).unsqueeze(-1), 0.0)
    weight_C = into.separate(weight)
    for piece in plan.pieces:
        rows = slice(piece.start, piece.stop)
        dy_TO = dy_NSO[rows].flatten(0, 1).to(weight_C[piece.cell].dtype)
        weight_C[piece.cell].index_add_(0, ids_NS[rows].flatten(), dy_TO)
