"""One policy's momenta by part, and its parameters before the last step: what attribution keeps.

Legend: A parts (roles or slots) of the policy, M = A + 2 contributors (the parts, decay, carried), P numbers
of its covered parameters that this process accounts for, n of them in one segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.attribution.rules import Move
from gradscope.probes.attribution.settings import Attribution
from gradscope.probes.reduction import Reduction
from gradscope.probes.segments import Segment

EXTRA = ("decay", "carried")
"""Contributors beside the parts: weight decay, and momentum from before the parts were known."""
Mark = tuple[int, int] | None
"""Identity and version of a tensor; None for none."""
FADED = 1e-20
"""Momentum carried from before is dropped when it has shrunk to this part of itself."""


@dataclass
class Columns:
    """The buffers of one block.

    Attributes:
        names: Its parameters.
        parameters: The same.
        sizes: Numbers of each, P together.
        before: Parameters before the last step, `[P]`.
        momenta: Momentum of each part, `[A, P]`; None until an optimizer has one.
        extra: Momentum of decay and of what was carried over, each `[P]`, where there is any.
    """

    names: tuple[str, ...]
    parameters: list[nn.Parameter]
    sizes: list[int]
    before: torch.Tensor
    momenta: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    def slices(self) -> dict[str, slice]:
        """Returns where the numbers of each parameter stand."""
        result, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            result[name] = slice(start, start + size)
            start += size
        return result


class Ledger:
    """Momenta by part of one policy, from step to step.

    Args:
        sums: The policy's sums.
        part_of_slot: Number of the part of each of the policy's slots.
        settings: Precision of what is kept.

    Attributes:
        columns: The buffers, one for each block of the sums.
        marks: What tells the momentum of each parameter, by identity, as the last step left it.
        previous_square: Squared norm of the last applied change; NaN before the first.
        carried_weight: What is left of the carried momentum, as a factor.
    """

    def __init__(self, sums: SlotAccumulators, part_of_slot: Sequence[int], settings: Attribution) -> None:
        self.policy = sums.policy
        self.num_parts = max(part_of_slot) + 1
        self.columns: list[Columns] = []
        self.marks: dict[int, Mark] = {}
        self.previous_square = float("nan")
        self.carried_weight = 1.0
        self._part_of_slot = tuple(part_of_slot)
        self._settings = settings
        self._membership: dict[tuple[torch.device, int], torch.Tensor] = {}
        reduction = sums.reduction
        for block in sums.own_blocks():
            parameters = [sums.policy.covered[name] for name in block.names]
            sizes = [reduction.local(parameter).numel() for parameter in parameters]
            before = block.sums.new_empty(sum(sizes))
            self.columns.append(Columns(block.names, parameters, sizes, before))

    @property
    def rounding(self) -> float:
        """Relative error of the momenta that is put down to how they are kept."""
        return math.sqrt(torch.finfo(torch.bfloat16).eps) if self._settings.precision == "bfloat16" else 1e-6

    def keep_parameters(self, reduction: Reduction) -> None:
        """Copies the parameters as they are before a step."""
        for columns in self.columns:
            views = list(columns.before.split(columns.sizes))
            torch._foreach_copy_(views, [reduction.local(p) for p in columns.parameters])

    def membership(self, sums: SlotAccumulators, device: torch.device) -> torch.Tensor:
        """Returns which cell belongs to which part, `[A, C]`, float64."""
        key = (device, len(sums.cells))
        if key not in self._membership:
            membership = sums.cells.membership(self._part_of_slot)
            self._membership[key] = torch.from_numpy(membership.T.copy()).to(device)
        return self._membership[key]

    def advance(
        self,
        columns: Columns,
        segment: Segment,
        move: Move,
        gradients: torch.Tensor,
        before: torch.Tensor,
        scale: torch.Tensor | float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Moves the momenta of a segment by one step.

        Args:
            columns: The buffers of the segment's block.
            segment: Some of its columns.
            move: The optimizer's step.
            gradients: Gradients of the parts as the optimizer saw them, `[A, n]`.
            before: Parameters before the step, `[n]`.
            scale: Factor of the change, or one for each number, `[n]`.

        Returns:
            The contributions, `[M, n]`, and the momentum that the parts come to, `[n]`.
        """
        num_parts = self.num_parts
        entering = gradients.new_zeros(num_parts + 2, gradients.shape[1])
        torch.mul(gradients, move.sign, out=entering[:num_parts])
        if move.coupled_decay:
            torch.mul(before, move.coupled_decay, out=entering[num_parts])
        changes = entering * move.from_gradient
        momenta = torch.zeros_like(entering)
        if move.admit or move.retain:
            momenta = self._read(columns, segment, like=entering)
            momenta.mul_(move.retain).add_(entering, alpha=move.admit)
            self._write(columns, segment, momenta, with_decay=bool(move.coupled_decay))
            changes.add_(momenta, alpha=move.from_momentum)
        changes *= scale
        if move.decoupled_decay:
            changes[num_parts].add_(before, alpha=move.decoupled_decay)
        return changes, momenta.sum(0)

    def match(
        self, columns: Columns, segment: Segment, momentum: torch.Tensor, eps: float, *, replaced: bool
    ) -> None:
        """Brings the momenta of a segment to an optimizer's, `[n]`, which may be a strange one.

        Args:
            columns: The buffers of the segment's block.
            segment: Some of its columns.
            momentum: What the optimizer has.
            eps: Rounding step of what went into the momenta.
            replaced: Whether it is another than the last step left; the parts' then count no more.
        """
        known = self._read(columns, segment, like=momentum.expand(self.num_parts + 2, -1)).sum(0)
        tolerance = max(math.sqrt(eps), self.rounding)
        if bool((momentum - known).norm() <= tolerance * momentum.norm()):
            return
        if replaced:
            for name, tensor in (("momenta", columns.momenta), *columns.extra.items()):
                if tensor is not None and name != "carried":
                    tensor[..., segment.start : segment.stop] = 0
        self.set_carried(columns, segment, momentum)

    def set_carried(self, columns: Columns, segment: Segment, momentum: torch.Tensor) -> None:
        """Makes what an optimizer's momentum `[n]` has beyond the parts' the carried momentum."""
        self.carried_weight = 1.0
        known = self._read(columns, segment, like=momentum.expand(self.num_parts + 2, -1))
        rest = momentum - known[:-1].sum(0)
        if "carried" in columns.extra or bool(rest.any()):
            self._buffer(columns, "carried")[segment.start : segment.stop] = rest

    def fade(self, retain: float) -> None:
        """Notes that momentum was multiplied by `retain`; drops what was carried when nothing is left."""
        self.carried_weight *= retain
        if self.carried_weight < FADED:
            for columns in self.columns:
                columns.extra.pop("carried", None)

    def tensors(self) -> list[torch.Tensor]:
        """Returns every tensor that is held."""
        return [
            tensor
            for c in self.columns
            for tensor in (c.before, c.momenta, *c.extra.values())
            if tensor is not None
        ]

    def state(self) -> dict[str, Any]:
        """Returns what is kept: numbers, and tensors by parameter."""
        parameters = {
            name: {
                key: tensor[..., place].clone()
                for key, tensor in {"before": c.before, "momenta": c.momenta, **c.extra}.items()
                if tensor is not None
            }
            for c in self.columns
            for name, place in c.slices().items()
        }
        return {
            "previous_square": self.previous_square,
            "carried_weight": self.carried_weight,
            "parameters": parameters,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned.

        Raises:
            KeyError: Something is missing.
            RuntimeError: A shape differs.
        """
        self.previous_square = float(state["previous_square"])
        self.carried_weight = float(state["carried_weight"])
        for columns in self.columns:
            for name, place in columns.slices().items():
                for key, tensor in state["parameters"][name].items():
                    self._buffer(columns, key)[..., place] = tensor.to(columns.before.device)

    def _buffer(self, columns: Columns, key: str) -> torch.Tensor:
        if key == "before":
            return columns.before
        if key == "momenta":
            if columns.momenta is None:
                columns.momenta = self._new(columns, self.num_parts)
            return columns.momenta
        if key not in columns.extra:
            columns.extra[key] = self._new(columns)
        return columns.extra[key]

    def _new(self, columns: Columns, *rows: int) -> torch.Tensor:
        dtype = torch.bfloat16 if self._settings.precision == "bfloat16" else columns.before.dtype
        return columns.before.new_zeros(*rows, len(columns.before), dtype=dtype)

    def _read(self, columns: Columns, segment: Segment, *, like: torch.Tensor) -> torch.Tensor:
        place = slice(segment.start, segment.stop)
        result = torch.zeros_like(like, memory_format=torch.contiguous_format)
        if columns.momenta is not None:
            result[: self.num_parts] = columns.momenta[:, place]
        for row, name in enumerate(EXTRA, self.num_parts):
            if name in columns.extra:
                result[row] = columns.extra[name][place]
        return result

    def _write(self, columns: Columns, segment: Segment, momenta: torch.Tensor, *, with_decay: bool) -> None:
        place = slice(segment.start, segment.stop)
        self._buffer(columns, "momenta")[:, place] = momenta[: self.num_parts]
        if with_decay:
            self._buffer(columns, "decay")
        for row, name in enumerate(EXTRA, self.num_parts):
            if name in columns.extra:
                columns.extra[name][place] = momenta[row]
