"""Puts on a model what covers each of its parameters, by the kind of the claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from gradscope.probes.taps.capture import Collector, place_tap
from gradscope.probes.taps.fusing import fuse
from gradscope.probes.taps.mixing import watch_mixing
from gradscope.probes.taps.pure import place_hooks
from gradscope.probes.targets import Kind, Layout, Target


class Handle(Protocol):
    """Takes off again what was put on."""

    def remove(self) -> None:
        """Takes it off; the model is as it was before."""


PLACERS: dict[Kind, Callable[[Target, Collector], Handle]] = {
    "linear": place_tap,
    "transposed": place_tap,
    "embedding": place_tap,
    "affine": place_tap,
    "lora_embedding": place_tap,
}


def place(model: nn.Module, layout: Layout, collector: Collector) -> list[Handle]:
    """Returns the handles of all that was put on the model."""
    fusion = fuse(model, layout.targets if layout.mode == "fused" else (), collector)
    tapped = [target for target in layout.targets if id(target.module) not in fusion.untapped]
    handles: list[Handle] = [fusion, *(PLACERS[target.claim.kind](target, collector) for target in tapped)]
    handles += place_hooks(model, layout.hooked, collector, strict=layout.mode == "pure")
    return [*handles, *watch_mixing(model, collector)]
