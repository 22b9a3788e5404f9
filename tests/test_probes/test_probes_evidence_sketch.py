"""Sketches: linear, seeded by name, unbiased with the stated error, the same whatever else is sketched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradscope.probes.evidence.sketch import sketch

PINNED = [[-5.0, -9.0, 7.0, -9.0]]


def test_products_of_sketches_are_unbiased_with_the_stated_error():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(2, 5000, generator=generator, dtype=torch.float64)
    gradients[1] += gradients[0]
    truth = float(gradients[0] @ gradients[1])
    norms = gradients.norm(dim=1)
    for dim in (64, 256):
        sketches = [sketch(gradients, "weight", dim=dim, seed=seed) for seed in range(400)]
        errors = np.array([float(s[0] @ s[1]) - truth for s in sketches])
        stated = np.sqrt((float(norms[0] * norms[1]) ** 2 + truth**2) / dim)
        assert abs(errors.mean()) <= 4 * stated / np.sqrt(len(errors))
        assert errors.std() == pytest.approx(stated, rel=0.15)  # four standard errors of 400 values


def test_a_large_column_does_not_fill_a_single_bucket():
    gradients = torch.zeros(1, 64 * 256, dtype=torch.float64)
    gradients[0, 7::256] = 1.0  # one input feature in all 64 outputs
    found = sketch(gradients, "weight", dim=128, seed=0)
    assert int((found != 0).sum()) > 20


def test_signs_and_buckets_depend_on_seed_and_name_alone():
    gradients = torch.randn(5, 100, dtype=torch.float64)
    whole = sketch(gradients, "weight", dim=16, seed=1)
    assert torch.equal(whole[2:3], sketch(gradients[2:3], "weight", dim=16, seed=1))
    assert not torch.allclose(whole, sketch(gradients, "weight", dim=16, seed=2))
    assert not torch.allclose(whole, sketch(gradients, "other", dim=16, seed=1))
    # Stored sketches stay comparable from version to version.
    fixed = sketch(torch.arange(1.0, 9.0, dtype=torch.float64)[None], "weight", dim=4, seed=0)
    assert fixed.tolist() == PINNED
