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


def follow_parameters(layout: Layout) -> None:
    """Brings a layout up to date with the parameters that now stand on the modules; frees those before.

    `fully_shard`, and loading a state with `assign=True`, put others in the place of those that were there.

    Raises:
        ProbeError: A parameter is gone, as FSDP1 takes it away.
    """
    now: dict[int, nn.Parameter] = {}
    for target in layout.targets:
        for key, parameter in target.parameters.items():
            now[id(parameter)] = _parameter_at(target.module, key, target.name)
            target.parameters[key] = target.claim.parameters[key] = now[id(parameter)]
    for policy in layout.policies.values():
        for name, parameter in policy.covered.items():
            policy.covered[name] = now.get(id(parameter), parameter)


def _parameter_at(module: nn.Module, key: str, name: str) -> nn.Parameter:
    *path, last = key.split(".")
    for part in path:
        module = getattr(module, part)
    holder = module._parameters if isinstance(module, nn.Module) else {}
    parameter = holder.get(last)
    if parameter is None:
        raise ProbeError(
            f"'{name}' has no parameter '{key}' any more; FullyShardedDataParallel (FSDP1) takes parameters "
            "off their modules and cannot be probed. Use fully_shard (FSDP2) or DistributedDataParallel."
        )
    return parameter


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
