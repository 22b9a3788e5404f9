"""What FSDP2's `fully_shard` made of a model: which parameters are sharded, along which axis, among whom.

It replaces parameters by sharded ones, and while a module computes by whole ones, so that a parameter is not
the same object before `fully_shard`, after it and inside a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from gradscope.errors import ProbeError
from gradscope.probes.targets import Layout


@dataclass(frozen=True)
class Sharded:
    """How `fully_shard` keeps one parameter.

    Attributes:
        axis: The axis that is cut.
        divisor: What its gradient is divided by; None for the number of processes.
        group: The processes among which it is cut.
        copies: The processes that hold the same shard (hybrid sharding); None where there are none.
        reduced_in: Type in which gradients are added up; None for that of the gradient.
    """

    axis: int
    divisor: float | None
    group: distributed.ProcessGroup
    copies: distributed.ProcessGroup | None
    reduced_in: torch.dtype | None


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or inside it."""
    return next(_units(model), None) is not None


def show_shards(model: nn.Module) -> None:
    """Puts the sharded parameters back on the modules where whole ones are left of a forward pass."""
    for unit in _units(model):
        unit.reshard()


def read_shards(model: nn.Module) -> dict[int, Sharded]:
    """Returns how each parameter is kept, by the identity of the sharded parameter.

    Raises:
        ProbeError: A parameter is cut in another way than among data-parallel processes.
    """
    found = {}
    for unit in _units(model):
        for group in _groups(unit):
            for kept in group.fsdp_params:
                found[id(kept.sharded_param)] = _read(kept, group.gradient_divide_factor)
    return found


class Followed:
    """The parameters of a layout, whichever object now stands in the place of each on its module."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._shapes: dict[str, torch.Size] = {}
        for policy in layout.policies.values():
            for name, parameter in (policy.covered | policy.uncovered).items():
                path, _, key = name.rpartition(".")
                self._places[name] = (model.get_submodule(path), key)
                self._shapes[name] = parameter.shape

    @property
    def replaced(self) -> bool:
        """Whether others stand in the place of the parameters, told by the first that is no vector."""
        policy = next(iter(self._layout.policies.values()))
        matrices = (name for name in policy.covered if len(self._shapes[name]) > 1)
        name = next(matrices, next(iter(policy.covered)))
        module, key = self._places[name]
        now = module._parameters.get(key)
        return now is not policy.covered[name] or now.shape != self._shapes[name]

    def update(self) -> None:
        """Brings the layout up to date; what stood there before is freed.

        `fully_shard` replaces parameters, and so does loading a state with `assign=True`.

        Raises:
            ProbeError: A parameter is gone, as FSDP1 takes it away.
        """
        now: dict[int, nn.Parameter] = {}
        for policy in self._layout.policies.values():
            for parameters in (policy.covered, policy.uncovered):
                for name, parameter in parameters.items():
                    parameters[name] = now[id(parameter)] = self._find(name)
        for target in self._layout.targets:
            for parameters in (target.parameters, target.claim.parameters):
                for key, parameter in parameters.items():
                    parameters[key] = now.get(id(parameter), parameter)

    def _find(self, name: str) -> nn.Parameter:
        module, key = self._places[name]
        parameter = module._parameters.get(key)
        if parameter is None or parameter.shape != self._shapes[name]:
            raise ProbeError(self._why_gone(name))
        return parameter

    def _why_gone(self, name: str) -> str:
        """Returns what became of a parameter that is not where it was, or of another shape."""
        if distributed.is_available() and distributed.is_initialized():
            return (
                f"'{name}' is no parameter of its own any more; FullyShardedDataParallel (FSDP1) flattens "
                "parameters and cannot be probed. Use fully_shard (FSDP2) or DistributedDataParallel."
            )
        module, key = self._places[name]
        now = module._parameters.get(key)
        what = "taken out" if now is None else f"replaced: {_text(self._shapes[name])} -> {_text(now.shape)}"
        return (
            f"'{name}' was {what} since attach(), as resize_token_embeddings() does; attach() when the "
            "model is complete (detach() this scope first)."
        )


def _text(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))


def _units(model: nn.Module) -> Iterator[Any]:
    if distributed.is_available() and distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several since torch 2.13
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _read(kept: Any, divisor: float | None) -> Sharded:
    mesh = kept.mesh_info
    shard_group = getattr(mesh, "shard_process_group", None)
    if kept.is_dtensor or shard_group is None or kept.offload_to_cpu:
        raise ProbeError(
            "step(): a parameter is kept by fully_shard in a way that cannot be probed: tensor parallel "
            "beside data parallel, replicated without shards, or offloaded to the CPU. Shard over one mesh "
            "of data-parallel processes."
        )
    return Sharded(
        axis=kept.fsdp_placement.dim,
        divisor=divisor,
        group=shard_group,
        copies=getattr(mesh, "replicate_process_group", None),
        reduced_in=kept.mp_policy.reduce_dtype,
    )
