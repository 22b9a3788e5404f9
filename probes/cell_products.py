"""Inner products of cells over many columns, precise whatever type the sums have.

On an accelerator they are float64 products. On a CPU those take longer than float32 products by what casting
costs, so chunks of columns are multiplied in float32 and added up in float64: off by less than 1e-7 of
|g_k| |g_l|. The gradient's own norm is float64, and so is a stretch whose squares leave the range of float32.

Legend: C cells, n columns, B chunks of L columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK = 1024
"""Columns whose products are added up in float32."""
SMALLEST = 1e-25
"""Summed squares below this may have lost terms to float32's smallest number, about 1e-38."""


def cell_products(sums_Cn: torch.Tensor, gradient_n: torch.Tensor) -> torch.Tensor:
    """Returns the C x C products, |sum over cells - gradient|^2 and |gradient|^2, `[C C + 2]`, float64.

    Args:
        sums_Cn: Sums of the cells.
        gradient_n: What they should add up to, of the same type.
    """
    if sums_Cn.dtype == torch.float32 and not sums_Cn.is_cuda:
        found = _in_chunks(sums_Cn, gradient_n)
        if _in_range(found, sums_Cn):
            return found
    sums, gradient = sums_Cn.double(), gradient_n.double()
    gap = sums.sum(0) - gradient
    return torch.cat([(sums @ sums.T).flatten(), torch.stack([gap @ gap, gradient @ gradient])])


def _in_chunks(sums_Cn: torch.Tensor, gradient_n: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(len(sums_Cn) ** 2 + 2, dtype=torch.float64)
    gap_n = sums_Cn.sum(0).sub_(gradient_n)
    for start, stop, length in _stretches(len(gap_n)):
        sums_BCL = sums_Cn[:, start:stop].unflatten(1, (-1, length)).transpose(0, 1)
        result[:-2] += torch.bmm(sums_BCL, sums_BCL.transpose(1, 2)).double().sum(0).flatten()
        gap_B = torch.linalg.vector_norm(gap_n[start:stop].view(-1, length), dim=1)
        result[-2] += gap_B.double().square().sum()
    # One vector costs little: the norm that clipping sees is told in full.
    result[-1] = torch.linalg.vector_norm(gradient_n, dtype=torch.float64).square()
    return result


def _stretches(num_columns: int) -> Iterator[tuple[int, int, int]]:
    """Returns first column, end and length of chunks: whole ones together, and the rest."""
    whole = num_columns // CHUNK * CHUNK
    if whole:
        yield 0, whole, CHUNK
    if whole < num_columns:
        yield whole, num_columns, num_columns - whole


def _in_range(found: torch.Tensor, sums_Cn: torch.Tensor) -> bool:
    """Whether no square was too large or too small; what is infinite or undefined itself stays so."""
    squares = found[: len(sums_Cn) ** 2].view(len(sums_Cn), -1).diagonal()
    small = squares < SMALLEST
    return bool(found.isfinite().all()) and not bool(small.any() and sums_Cn[small].any())
