"""Puts on a model what covers each of its parameters."""

from __future__ import annotations

from torch import nn

from gradscope.probes.taps.capture import Collector, place_tap
from gradscope.probes.taps.copying import guard_copies
from gradscope.probes.taps.fusing import fuse
from gradscope.probes.taps.lora_tap import pair_matrices, tap_pair
from gradscope.probes.taps.mixing import watch_mixing
from gradscope.probes.taps.pure import Handle, place_hooks
from gradscope.probes.targets import Layout


def place(model: nn.Module, layout: Layout, collector: Collector) -> list[Handle]:
    """Returns the handles of all that was put on the model."""
    by_module = {id(target.module): target for target in layout.targets}
    pairs = {
        module: tap
        for adapter in list(pair_matrices(model, by_module))
        for module, tap in tap_pair(adapter, collector).items()
    }
    fusion = fuse(model, layout.targets if layout.mode == "fused" else (), collector)
    handles: list[Handle] = [fusion]
    for target in layout.targets:
        module = target.module
        if id(module) in pairs:
            handles.append(module.register_forward_hook(pairs[id(module)], with_kwargs=True))
        elif id(module) not in fusion.untapped:
            handles.append(place_tap(target, collector))
    handles += place_hooks(model, layout.hooked, collector, strict=layout.mode == "pure")
    handles += watch_mixing(model, collector)
    return [*handles, *guard_copies(model)]
