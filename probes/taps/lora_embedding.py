"""Slot gradients of PEFT's LoRA on embeddings, whose two matrices are used without a module of their own.

For y = base + s * (A^T[ids]) B^T the gradient of the output is all that is needed beside the ids: with
dz = s dy B, the rows of A^T that were looked up get dz, and B gets s dy' A^T[ids].

Legend: N tagged rows, S tokens of a row, R rank, O outputs, C cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch

A, B = "lora_embedding_A", "lora_embedding_B"
"""Names of the dictionaries of matrices, `[R, V]` and `[O, R]`."""


def plain_adapters(module: nn.Module) -> list[str]:
    """Returns the adapters of a LoRA embedding layer that are plain LoRA; none for another module."""
    parts = (getattr(module, A, None), getattr(module, B, None))
    base = getattr(module, "base_layer", None)
    if not all(isinstance(part, nn.ParameterDict) for part in parts) or not isinstance(base, nn.Embedding):
        return []
    if base.sparse or base.scale_grad_by_freq or base.max_norm is not None:
        return []
    variants = getattr(module, "lora_variant", {})
    return [adapter for adapter in getattr(module, A) if adapter not in variants]


def takes_part(module: Any, key: str) -> bool:
    """Returns whether a matrix, by its name in the module, is in use: its adapter active, not merged."""
    return (
        not module.disable_adapters
        and not module.merged
        and key.split(".", maxsplit=1)[1] in module.active_adapters
    )


def add_lora_embedding(
    module: Any,
    wanted: Mapping[str, nn.Parameter],
    batch: RowBatch,
    sums_of: Mapping[str, SlotAccumulators],
    ids: torch.Tensor,
    dy: torch.Tensor,
) -> None:
    """Adds each cell's gradient of the matrices to the sums.

    Args:
        module: The LoRA layer.
        wanted: The matrices that take part, by their name in the module, such as `lora_embedding_A.default`.
        batch: The rows that went through it.
        sums_of: The sums that each of them goes to.
        ids: Its input, `[N, ...]`.
        dy: Gradient of its output, `[N, ..., O]`.
    """
    base = module.get_base_layer()
    embed_scale = module._get_embed_scale()
    for key, parameter in wanted.items():
        part, adapter = key.split(".", maxsplit=1)
        matrix_A, matrix_B = getattr(module, A)[adapter].detach(), getattr(module, B)[adapter].detach()
        into = sums_of[key]
        plan = batch.plan(into.cells, dy.device)
        order = slice(None) if plan.order is None else plan.order
        ids_NS = ids[order].reshape(len(batch), -1)
        sums_C = into.separate(parameter)
        dtype = sums_C[0].dtype
        scaled_NSO = dy[order].reshape(len(batch), ids_NS.shape[1], -1).to(dtype) * module.scaling[adapter]
        if embed_scale is not None:
            scaled_NSO = scaled_NSO * embed_scale.to(dtype)
        if part == A:
            dz_NSR = scaled_NSO @ matrix_B.to(dtype)
            if base.padding_idx is not None:  # looked up, but given no gradient
                dz_NSR = dz_NSR.masked_fill((ids_NS == base.padding_idx).unsqueeze(-1), 0.0)
        for piece in plan.pieces:
            rows = slice(piece.start, piece.stop)
            ids_T = ids_NS[rows].flatten()
            if part == A:
                sums_C[piece.cell].index_add_(1, ids_T, dz_NSR[rows].flatten(0, 1).t())
            else:
                looked_up_RT = matrix_A[:, ids_T].to(dtype)
                sums_C[piece.cell].addmm_(scaled_NSO[rows].flatten(0, 1).t(), looked_up_RT.t())
