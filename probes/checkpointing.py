"""Gives a checkpointed stretch that is run again in the backward the rows of its first run.

Non-reentrant checkpointing needs no help: the taps of the first run are the ones that see gradients.
Reentrant checkpointing runs its first forward without gradients, so that only the taps of the second run
count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gradscope.probes.taps.capture import Collector

ATTRIBUTE = "_gradient_checkpointing_func"
"""Where modules of transformers keep the checkpoint function that enabling gives them."""


def bind_checkpointing(model: nn.Module, collector: Collector) -> Callable[[], None]:
    """Wraps the checkpoint function of every module that has one; returns what undoes it."""
    originals = [
        (module, function)
        for module in model.modules()
        if (function := module.__dict__.get(ATTRIBUTE)) is not None
    ]
    for module, function in originals:
        setattr(module, ATTRIBUTE, _bound(function, collector))

    def undo() -> None:
        for module, function in originals:
            setattr(module, ATTRIBUTE, function)
        originals.clear()

    return undo


def _bound(checkpoint: Callable[..., Any], collector: Collector) -> Callable[..., Any]:
    def checkpoint_with_rows(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = collector.batch

        def with_rows(*inner_args: Any, **inner_kwargs: Any) -> Any:
            before, collector.recomputed = collector.recomputed, batch
            try:
                return function(*inner_args, **inner_kwargs)
            finally:
                collector.recomputed = before

        return checkpoint(with_rows, *args, **kwargs)

    return checkpoint_with_rows
