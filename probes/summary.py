"""What one policy's update comes to: products of its cells, norms, and how they agree with autograd.

Legend: C cells and K slots of the policy (`gradscope.probes.cells`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradscope.probes.cells import Cells

CANCELLED = 8.0
"""Rounding steps of the terms, root of summed squares, that sums and autograd may differ by. Where terms
cancel exactly, at most 2.4 were measured: float64 to bfloat16, autocast, one call or several."""


@dataclass(frozen=True)
class Summary:
    """What an update comes to, over all processes.

    Attributes:
        cells: What the axes of `cell_gram` stand for.
        cell_gram: Inner products of the cells' gradients, `[C, C]`, float64.
        grad_norm: Norm of what autograd left in `.grad`, over all trainable parameters of the policy.
        covered_norm: The same over covered parameters.
        gap: Norm of (sum of the cells' gradients - what autograd left), over covered parameters.
        terms: Root of the summed squares of the terms that were added up, about (`gradscope.probes.terms`).
    """

    cells: Cells
    cell_gram: NDArray[np.float64]
    grad_norm: float
    covered_norm: float
    gap: float
    terms: float

    @property
    def gram(self) -> NDArray[np.float64]:
        """Inner products of the slot gradients, `[K, K]`."""
        return self.cells.gram(self.cell_gram)

    @property
    def residual(self) -> float:
        """`gap` relative to `covered_norm`; NaN where that is not finite, 0 where both are 0."""
        if not math.isfinite(self.covered_norm):
            return math.nan
        if self.covered_norm == 0:
            return 0.0 if self.gap == 0 else math.inf
        return self.gap / self.covered_norm

    def added_norm(self, eps: float) -> float:
        """Returns the norm of what was added up in this update; 0 where not finite.

        Of it the square root of `eps`, the rounding step, may be lost: cells may cancel in the sum, and terms
        within a cell. Where all terms do, rounding is all that is left of them.
        """
        cells = math.sqrt(max(float(np.trace(self.cell_gram)), 0.0))
        norm = max(self.covered_norm, cells, CANCELLED * math.sqrt(eps) * self.terms)
        return norm if math.isfinite(norm) else 0.0
