"""Mirrors a run that goes on to trackers; one that fails is left out, and training goes on."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from gradscope.errors import ConfigError
from gradscope.exporters import EXPORTERS
from gradscope.exporters.names import evaluation_values, gradient_values, train_values, update_values
from gradscope.exporters.sink import Sink, Target, present
from gradscope.extras import extra_of, installing
from gradscope.runfile import UpdateRecord
from gradscope.train.config.sections import TrackingSection

FAILED = "tracker_failed"


def check_installed(section: TrackingSection) -> None:
    """Refuses trackers whose package is not here, before any work is done.

    Raises:
        ConfigError: One is not.
    """
    for name in section.to:
        package = EXPORTERS.get(name).package
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"tracking.to: '{name}' needs the package {package}, which is not installed. "
                f"{installing(extra_of(package))}, or leave it out."
            )


class Mirrors:
    """Tells trackers what the run file is told; a context manager.

    Args:
        section: Which trackers, and under what project and name.
        folder: Run directory.
        slots: Slot to role.
        policies: Slot to policy.
        config: The run's configuration, for trackers that keep one.
        run_ids: Tracker to its id of the run, from a checkpoint.
        from_step: Step that the run goes on from; None for a new one.
        tell: Takes step, kind and message of an event.

    Attributes:
        run_ids: Tracker to its id of the run, for checkpoints; those given stay where a tracker has failed.
    """

    def __init__(
        self,
        section: TrackingSection,
        folder: Path,
        *,
        slots: Mapping[str, str],
        policies: Mapping[str, str],
        config: Mapping[str, Any],
        run_ids: Mapping[str, str],
        from_step: int | None,
        tell: Callable[[int, str, str], object],
    ) -> None:
        self.run_ids = dict(run_ids)
        self._slots = slots
        self._tell = tell
        self._last_step = from_step or 0
        self._sinks: dict[str, Sink] = {}
        about = {"config": dict(config), "slots": dict(slots), "policies": dict(policies)}
        for name in section.to:
            exporter = EXPORTERS.get(name)
            target = Target(
                path=folder / exporter.default_path,
                project=section.project,
                name=section.name or folder.resolve().name,
                run_id=self.run_ids.get(name, ""),
                from_step=from_step,
                about=about,
            )
            self._guarded(name, self._last_step, partial(exporter, target))

    def __enter__(self) -> Mirrors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self, step: int, records: Sequence[UpdateRecord], metrics: Mapping[str, Any]) -> None:
        """Tells of one training step."""
        self._last_step = step
        for name, sink in list(self._sinks.items()):
            self._guarded(name, step, partial(self._log_step, sink, step, records, metrics))

    def evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Tells of one evaluation; `row` has its columns in `/eval`."""
        self._last_step = step
        for name, sink in list(self._sinks.items()):
            self._guarded(name, step, partial(_log_evaluation, sink, step, row))

    def flush(self, step: int) -> None:
        """Makes what was told readable, as a checkpoint does."""
        self._last_step = step
        for name, sink in list(self._sinks.items()):
            self._guarded(name, step, sink.flush)

    def close(self) -> None:
        """Ends the run at every tracker."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, self._last_step, sink.close)
        self._sinks = {}

    def _log_step(
        self, sink: Sink, step: int, records: Sequence[UpdateRecord], metrics: Mapping[str, Any]
    ) -> None:
        values = train_values(metrics) | update_values(records, products=sink.holds_products)
        if not sink.holds_products:
            values |= gradient_values(records, self._slots)
        sink.log(step, values, wall_time=present())

    def _guarded(self, name: str, step: int, act: Callable[[], Any]) -> None:
        """Does something at a tracker; whatever it raises ends it, and is told once."""
        try:
            made = act()
        except Exception as error:
            self._sinks.pop(name, None)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
            message = f"tracker '{name}' failed and is told nothing more ({reason})"
            self._tell(step, FAILED, message)
            warnings.warn(f"{message}; training goes on.", UserWarning, stacklevel=3)
            return
        if made is not None:
            self._sinks[name] = made
            self.run_ids[name] = made.run_id


def _log_evaluation(sink: Sink, step: int, row: Mapping[str, Any]) -> None:
    sink.log(step, evaluation_values(row), wall_time=present())
