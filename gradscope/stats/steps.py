"""The step that a row stands for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def as_step(steps: NDArray[np.float64] | None, row: int | None) -> int | float | None:
    """Returns the step of a row, whole where it is; None where either is unknown."""
    if steps is None or row is None:
        return None
    value = float(steps[row])
    return int(value) if value.is_integer() else value
