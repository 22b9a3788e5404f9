"""What a loss scaler has multiplied the loss and the gradients by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.amp.grad_scaler import OptState


@dataclass(frozen=True)
class Scales:
    """Factors that bring numbers to the units of the unscaled loss: of the sums, and of `.grad`."""

    sums: float = 1.0
    gradients: float = 1.0


def read_scales(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> Scales:
    """Returns the factors at this point of an update; one copy to the host where there is a scaler."""
    if scaler is None or not scaler.is_enabled():
        return Scales()
    # In float32, as unscale_ multiplies by it: in double precision the rest would pass for a gap.
    inverse = float(np.float32(1.0 / scaler.get_scale()))
    # Only the scaler knows whether unscale_ was called, and has no public word for it.
    unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY
    return Scales(inverse, 1.0 if unscaled else inverse)
