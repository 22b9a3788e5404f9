"""trackio: a run of a project in its SQLite file, in the folder that TRACKIO_DIR names."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from typing import ClassVar

from gradscope.exporters.sink import AXIS, Target


class Exporter:
    """Trackio run of a project, in the folder that TRACKIO_DIR names."""

    package: ClassVar[str] = "trackio"
    holds_about: ClassVar[bool] = True
    holds_products: ClassVar[bool] = False
    default_path: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        import trackio

        self.run_id = target.run_id or target.name
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open its dashboard
            self._run = trackio.init(
                project=target.project,
                name=self.run_id,
                resume="allow",
                config=dict(target.about),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float], *, wall_time: float = math.nan) -> None:
        """Takes scalars of one step."""
        self._run.log({**values, AXIS: step})

    def flush(self) -> None:
        """Does nothing: trackio writes what it has on its own."""

    def close(self) -> None:
        """Waits until all is written and ends the run."""
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # and not the run's own, after which the library would finish it again at exit
