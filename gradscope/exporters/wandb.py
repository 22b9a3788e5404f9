"""Weights & Biases, online or offline as its own environment variables say (WANDB_MODE=offline)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from gradscope.exporters.sink import AXIS, Target


class Exporter:
    """Weights & Biases run of a project; WANDB_MODE=offline keeps it here until 'wandb sync'."""

    package: ClassVar[str] = "wandb"
    holds_about: ClassVar[bool] = True
    holds_products: ClassVar[bool] = False
    default_path: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        client = target.client
        if client is None:
            import wandb as client
        self._run = client.init(
            project=target.project,
            name=target.name,
            id=target.run_id or None,
            resume="allow",
            dir=str(target.path),
            config=dict(target.about),
        )
        self.run_id = str(self._run.id)
        # W&B takes no step below its last one, so a resumed run needs an axis of its own.
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def log(self, step: int, values: Mapping[str, float], *, wall_time: float = math.nan) -> None:
        """Takes scalars of one step."""
        self._run.log({**values, AXIS: step})

    def flush(self) -> None:
        """Does nothing: W&B sends what it has on its own."""

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()
