"""Inner products of sums in float32 are as precise as in float64."""

from __future__ import annotations

import pytest
import torch

from gradscope.probes.cell_products import CHUNK, cell_products


def in_double(sums, gradient):
    sums, gradient = sums.double(), gradient.double()
    return sums @ sums.T, sums.sum(0) - gradient, gradient


@pytest.mark.parametrize("columns", [1, 7, CHUNK, 5 * CHUNK, 5 * CHUNK + 3])
@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (1e22, 1.0, 1e-22), (1e-21, 0.0, 1e-18)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_of_any_size(columns, sizes, dtype):
    torch.manual_seed(0)
    sums = torch.randn(3, columns, dtype=dtype) * torch.tensor(sizes, dtype=dtype).unsqueeze(1)
    gradient = torch.randn(columns, dtype=dtype)
    gram, gap, gradient_64 = in_double(sums, gradient)
    found = cell_products(sums, gradient)
    scale = gram.diagonal().sqrt()
    assert found.dtype == torch.float64
    error = (found[:-2].view(3, 3) - gram).abs()
    assert bool((error <= 1e-7 * torch.outer(scale, scale)).all())
    assert float(found[-2].sqrt()) == pytest.approx(float(gap.norm()), rel=1e-6)
    assert float(found[-1].sqrt()) == pytest.approx(float(gradient_64.norm()), rel=1e-6)


def test_what_is_not_finite_stays_so():
    sums = torch.ones(2, 5)
    sums[0, 3] = torch.nan
    found = cell_products(sums, sums.sum(0))
    assert found[[0, 1, 2]].isnan().all()
    assert found[3] == 5
