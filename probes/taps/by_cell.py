"""Sums over the tokens of each cell, for parameters whose gradient is one number a feature.

Legend: N tagged rows, T tokens of all of them, C cells, D features.
"""

from __future__ import annotations

from typing import cast

import torch

from gradscope.probes.cells import Cells
from gradscope.probes.rows import RowBatch


def sum_by_cell(
    x_TD: torch.Tensor, scale_T: torch.Tensor | None, batch: RowBatch, cells: Cells
) -> torch.Tensor:
    """Returns `[C, D]`, the sums of `scale * x` over the tokens of each cell; other rows count in none.

    Args:
        x_TD: Numbers of each token, rows of the batch one after the other.
        scale_T: A factor for each token; None for 1.
        batch: The rows.
        cells: The cells of the policy.
    """
    if x_TD.device.type == "cpu":
        product_CD = _product(x_TD, scale_T, batch, cells)
        # A zero times what is not finite is no zero: one diverged slot would spoil the others.
        if bool(product_CD.isfinite().all()):
            return product_CD
    # Not as a product on an accelerator, where TF32 might round it.
    if scale_T is not None:
        x_TD = x_TD * scale_T.view(-1, 1)
    rows_ND = x_TD.view(len(batch), -1, x_TD.shape[1]).sum(1)
    # One row more takes what belongs to no cell.
    parts = rows_ND.new_zeros(len(cells) + 1, x_TD.shape[1])
    return parts.index_add_(0, batch.places(cells, x_TD.device), rows_ND)[:-1]


def _product(x_TD: torch.Tensor, scale_T: torch.Tensor | None, batch: RowBatch, cells: Cells) -> torch.Tensor:
    chosen_CN = _chosen(batch, cells, x_TD.dtype)
    num_tokens = len(x_TD) // len(batch)
    if scale_T is None:
        weights_CNS = chosen_CN.unsqueeze(2).expand(-1, -1, num_tokens)
    else:
        weights_CNS = chosen_CN.unsqueeze(2) * scale_T.view(len(batch), num_tokens)
    return weights_CNS.reshape(len(chosen_CN), -1) @ x_TD


def all_in_cells(batch: RowBatch, cells: Cells) -> bool:
    """Returns whether every row is of one of the cells."""
    key = ("all in", cells)
    if key not in batch.cuts:
        batch.cuts[key] = all(cell in cells.local for cell in batch.cell_N)
    return bool(batch.cuts[key])


def _chosen(batch: RowBatch, cells: Cells, dtype: torch.dtype) -> torch.Tensor:
    """Returns 1 where a row is of a cell, 0 elsewhere, `[C, N]`, the same object for the same question."""
    key = ("chosen", cells, dtype)
    if key not in batch.cuts:
        places = batch.places(cells, torch.device("cpu"))
        batch.cuts[key] = torch.eq(torch.arange(len(cells)).unsqueeze(1), places).to(dtype)
    return cast(torch.Tensor, batch.cuts[key])
