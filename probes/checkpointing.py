"""Gives a checkpointed stretch that is run again in the backward the rows of its first run.

Non-reentrant checkpointing needs no help: the taps of the first run are the ones that see gradients.
Reentrant checkpointing runs its first forward without gradients, so that only the taps of the second run
count. All of it, called by transformers or by hand, goes through torch's `CheckpointFunction`, whose two
halves are wrapped while a scope is attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from gradscope.probes.taps.capture import Collector

ATTRIBUTE = "_gradscope_rows"
"""Where a checkpoint node keeps the rows of each scope."""

_collectors: weakref.WeakSet[Collector] = weakref.WeakSet()
"""Those of the scopes attached now; torch's class is one for the whole process. A scope that is dropped with
its model is not kept."""

_originals: dict[str, Any] = {}


def bind_checkpointing(collector: Collector) -> Callable[[], None]:
    """Wraps torch's checkpoint function for a scope; returns what undoes it."""
    if not _originals:
        _originals.update({half: vars(CheckpointFunction)[half] for half in ("forward", "backward")})
        wrapped = {
            "forward": _remembering(CheckpointFunction.forward),
            "backward": _restoring(CheckpointFunction.backward),
        }
        for half, function in wrapped.items():
            setattr(CheckpointFunction, half, staticmethod(function))
    _collectors.add(collector)

    def undo() -> None:
        _collectors.discard(collector)
        while not _collectors and _originals:
            setattr(CheckpointFunction, *_originals.popitem())

    return undo


def _remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_with_rows(ctx: Any, *args: Any) -> Any:
        setattr(ctx, ATTRIBUTE, [(collector, collector.rows) for collector in _collectors])
        return forward(ctx, *args)

    return forward_with_rows


def _restoring(backward: Callable[..., Any]) -> Callable[..., Any]:
    def backward_with_rows(ctx: Any, *args: Any) -> Any:
        with ExitStack() as stack:
            for collector, rows in getattr(ctx, ATTRIBUTE, ()):
                stack.enter_context(collector.recomputing(rows))
            return backward(ctx, *args)

    return backward_with_rows
