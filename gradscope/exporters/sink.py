"""Where scalars go: what an exporter is told, and what it does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

AXIS = "train/global_step"
"""Key of the training step where a tracker's own step only counts log calls."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where an exporter writes, and as what.

    Attributes:
        path: File or folder, for exporters that write one.
        project: Project, for trackers that have them.
        name: What the run is called there.
        run_id: The tracker's id of a run that goes on; empty for a new one.
        from_step: Last step that a run which goes on keeps; None for a new one.
        about: What else the tool may keep of the run: config, and `slots` and `policies` to read it back.
        client: In place of the tool's own library, for W&B.
    """

    path: Path
    project: str
    name: str
    run_id: str = ""
    from_step: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    client: Any = None


class Sink(Protocol):
    """An exporter at work.

    Attributes:
        package: What it needs installed; empty for nothing.
        holds_about: Whether it keeps `Target.about`, texts that is.
        holds_products: Whether it is a table, which takes inner products; else it gets norms and shares.
        default_path: Name of what it writes in a run directory; empty for one that writes elsewhere.
        run_id: By which a run that goes on finds its place again; empty where the path does that.
    """

    package: ClassVar[str]
    holds_about: ClassVar[bool]
    holds_products: ClassVar[bool]
    default_path: ClassVar[str]
    run_id: str

    def __init__(self, target: Target) -> None: ...

    def log(self, step: int, values: Mapping[str, float], *, wall_time: float = ...) -> None:
        """Takes scalars of one step; a step may come several times, steps in rising order."""

    def flush(self) -> None:
        """Makes sure that what was logged so far can be read."""

    def close(self) -> None:
        """Ends the run there."""


def present() -> float:
    """Returns the time, in seconds since 1970-01-01, UTC."""
    return time.time()
