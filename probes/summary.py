"""What one policy's update comes to: products of its cells, norms, and how they agree with autograd.

Legend: C cells and K slots of the policy (`gradscope.probes.cells`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradscope.probes.cells import Cells


@dataclass(frozen=True)
class Summary:
    """What an update comes to, over all processes.

    Attributes:
        cells: What the axes of `cell_gram` stand for.
        cell_gram: Inner products of the cells' gradients, `[C, C]`, float64.
        grad_norm: Norm of what autograd left in `.grad`, over all trainable parameters of the policy.
        covered_norm: The same over covered parameters.
        gap: Norm of (sum of the cells' gradients - what autograd left), over covered parameters.
    """

    cells: Cells
    cell_gram: NDArray[np.float64]
    grad_norm: float
    covered_norm: float
    gap: float

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

    @property
    def finite_norm(self) -> float:
        """The larger of `covered_norm` and the root of the summed squares of the cells; 0 where not finite.

        Cells may cancel in the sum, so that rounding is measured against what was added up.
        """
        norm = max(self.covered_norm, math.sqrt(max(float(np.trace(self.cell_gram)), 0.0)))
        return norm if math.isfinite(norm) else 0.0
