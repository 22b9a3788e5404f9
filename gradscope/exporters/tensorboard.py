"""TensorBoard event files, written by TensorBoard's own writer, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from gradscope.exporters.sink import Target, present


class Exporter:
    """TensorBoard event files in a folder; 32-bit floats, as TensorBoard keeps them."""

    package: ClassVar[str] = "tensorboard"
    holds_about: ClassVar[bool] = False
    holds_products: ClassVar[bool] = False
    default_path: ClassVar[str] = "tensorboard"

    def __init__(self, target: Target) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = ""
        target.path.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(target.path))
        if target.from_step is not None:
            # By this TensorBoard hides what an earlier file of the run holds from that step on.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            event = event_pb2.Event(wall_time=present(), step=target.from_step + 1, session_log=start)
            self._writer.add_event(event)

    def log(self, step: int, values: Mapping[str, float], *, wall_time: float = math.nan) -> None:
        """Takes scalars of one step."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        scalars = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        time = present() if math.isnan(wall_time) else wall_time
        summary = summary_pb2.Summary(value=scalars)
        self._writer.add_event(event_pb2.Event(wall_time=time, step=step, summary=summary))

    def flush(self) -> None:
        """Forces what was logged into the file."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
