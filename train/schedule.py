"""The learning rate of a training step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    num_steps: int,
    warmup_steps: int = 0,
    schedule: Literal["constant", "cosine"] = "constant",
) -> float:
    """Returns the rate of training step `step` (the first is 1), the same for all updates of the step.

    It rises linearly to `peak` at step `warmup_steps`, then stays or falls as a half cosine to 0 at step
    `num_steps`.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
