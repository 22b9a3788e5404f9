"""Data-parallel training: every process holds rows of the update, and the gradient is their mean.

Products of one process's gradients are no products of the update's: <g_k, g_l> has a term for every pair of
processes. So sums are added up over processes first, once per step, by a reduce-scatter that leaves each
process a part of the columns. It multiplies its part, and the small products are added up.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradscope.errors import ProbeError
from gradscope.probes.ranks import Cut, Ranks
from gradscope.probes.reduction import Reduction
from gradscope.probes.sharding import Followed, Sharded, is_sharded, read_shards, show_shards
from gradscope.probes.targets import Layout


class Replicas(Ranks):
    """Processes under `DistributedDataParallel`: each has every parameter and accounts for a piece of it."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        super().__init__(wrapper.process_group, next(wrapper.parameters()).device)
        if wrapper._comm_hooks:  # most send gradients in fewer bits
            self.eps = torch.finfo(torch.bfloat16).eps

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this process's piece of a tensor, flat."""
        flat = tensor.detach().reshape(-1)
        cut = self._cut(flat.numel(), 0)
        start = min(self._piece * cut.piece, flat.numel())
        return flat[start : start + cut.length(self._piece)]

    def cut(self, parameter: nn.Parameter, start: int) -> Cut:
        """Returns how a parameter is cut, whose columns begin at `start`."""
        return self._cut(parameter.numel(), start)

    def _cut(self, numbers: int, start: int) -> Cut:
        return Cut(start, numbers, math.ceil(numbers / self._pieces), divisor=self.size)


class Shards(Ranks):
    """Processes under `fully_shard`: parameters, gradients and optimizer states are cut already.

    Args:
        parameters: How each parameter is kept, by its identity.
        device: Where the parameters lie.

    Raises:
        ProbeError: They are not all cut among the same processes.
    """

    def __init__(self, parameters: dict[int, Sharded], device: torch.device) -> None:
        first = next(iter(parameters.values()))
        super().__init__(first.group, device, copies=first.copies)
        for kept in parameters.values():
            if kept.group is not first.group or kept.copies is not first.copies:
                raise ProbeError(
                    "step(): parameters are sharded over several meshes; use one for all of them."
                )
            if kept.reduced_in is not None:
                self.eps = max(self.eps, torch.finfo(kept.reduced_in).eps)
        self._parameters = parameters

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this process's shard of a tensor, flat."""
        return tensor.detach().to_local().reshape(-1)  # type: ignore[attr-defined]

    def cut(self, parameter: nn.Parameter, start: int) -> Cut:
        """Returns how a parameter is cut, whose columns begin at `start`."""
        kept, shape = self._parameters[id(parameter)], parameter.shape
        before, along, after = (
            math.prod(shape[: kept.axis]),
            shape[kept.axis],
            math.prod(shape[kept.axis + 1 :]),
        )
        piece = math.ceil(along / self._pieces) * before * after
        axes = None if kept.axis == 0 else (before, along, after)
        return Cut(start, parameter.numel(), piece, divisor=kept.divisor or self.size, axes=axes)


class Processes:
    """Finds out how the processes of a training share its work.

    The model may be wrapped or sharded after `attach`, so that this is looked for until it is found.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        _refuse_tensor_parallel(model)
        self.reduction = Reduction()
        self._model = model
        self._layout = layout
        self._followed = Followed(model, layout)
        self._wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
        self._handle = model.register_forward_pre_hook(self._notice)
        self._warned: set[str] = set()
        show_shards(model)

    @property
    def several(self) -> bool:
        """Whether other processes may wait for this one."""
        return (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        )

    def prepare(self) -> None:
        """Follows parameters that were replaced since `attach`; called before every micro-batch.

        Raises:
            ProbeError: They were taken away.
        """
        if not isinstance(self.reduction, Shards) and self._followed.replaced:
            show_shards(self._model)
            self._followed.update()

    def find_reduction(self) -> Reduction:
        """Returns how this process's sums become those of the update.

        Raises:
            ProbeError: The work is shared in a way that cannot be probed.
        """
        if self.reduction.size == 1:
            if self._wrapper is not None:
                self.reduction = _replicas(self._wrapper)
            elif is_sharded(self._model):
                self.reduction = self._shards()
        return self.reduction

    def warn(self, message: str) -> None:
        """Warns once, on every process: where warnings are errors, all must stop."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def remove(self) -> None:
        """Takes the hook off the model."""
        self._handle.remove()

    def _shards(self) -> Shards:
        kept = read_shards(self._model)
        trained = [
            (name, parameter)
            for policy in self._layout.policies.values()
            for name, parameter in (*policy.covered.items(), *policy.uncovered.items())
        ]
        for name, parameter in trained:
            if id(parameter) not in kept:
                raise ProbeError(
                    f"step(): '{name}' is trained but not sharded, so that nobody adds its gradients up; "
                    "apply fully_shard to the root module too."
                )
        return Shards({id(p): kept[id(p)] for _, p in trained}, trained[0][1].device)

    def _notice(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._wrapper = DistributedDataParallel._get_active_ddp_module() or self._wrapper


def _refuse_tensor_parallel(model: nn.Module) -> None:
    if is_sharded(model):
        return
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise ProbeError(
                f"attach(): '{name}' is a distributed tensor that fully_shard did not make; tensor-parallel "
                "models cannot be probed. Train with DDP or FSDP2."
            )


def _replicas(wrapper: DistributedDataParallel) -> Reduction:
    if wrapper._join_config.enable:
        raise ProbeError(
            "step(): DistributedDataParallel.join() lets processes run out of rows at different steps, and "
            "those that have none left would be waited for. Give every rank a batch in every step."
        )
    return Replicas(wrapper)
