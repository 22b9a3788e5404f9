"""One policy's momenta by part, and its parameters before the last step: what attribution keeps.

Legend: A parts (roles or slots) of the policy, M = A + 2 contributors (the parts, decay, carried), P numbers
of its covered parameters that this process accounts for, n of them in one segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.attribution.rules import Move
from gradscope.probes.attribution.settings import Attribution
from gradscope.probes.cells import Cells
from gradscope.probes.reduction import Reduction
from gradscope.probes.segments import Segment
from gradscope.schema import EXTRA_CONTRIBUTORS

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

    def add_parts(self, cells: Cells, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the gradients of the parts, `[A, n]`, as sums of those of the cells, `[C, n]`."""
        out.zero_()
        part_of_cell = cells.parts(self._part_of_slot).tolist()
        stop = 0
        for part, run in groupby(part_of_cell):
            start, stop = stop, stop + len(list(run))
            out[part].add_(sums[start] if stop == start + 1 else sums[start:stop].sum(0))

    def advance(
        self,
        columns: Columns,
        segment: Segment,
        move: Move,
        gradients: torch.Tensor,
        factor: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Moves the momenta of a segment by one step.

        Args:
            columns: The buffers of the segment's block.
            segment: Some of its columns.
            move: The optimizer's step.
            gradients: Gradients of the parts, `[A, n]`.
            factor: What the optimizer saw them multiplied by.
            out: Takes what the contributions, `[M, n]`, are but for the scale and decoupled decay.
        """
        place, parts = slice(segment.start, segment.stop), out[: self.num_parts]
        entering = (factor * move.sign).to(out.dtype)
        out.zero_()
        if move.admit or move.retain:
            momenta = self.buffer(columns, "momenta")[:, place]
            moved = momenta.to(out.dtype).mul_(move.retain).addcmul_(gradients, entering * move.admit)
            if moved.dtype != momenta.dtype:
                momenta.copy_(moved)
            torch.mul(moved, move.from_momentum, out=parts)
        if move.from_gradient:
            parts.addcmul_(gradients, entering * move.from_gradient)
        for row, name in enumerate(EXTRA_CONTRIBUTORS, self.num_parts):
            decay = move.coupled_decay if name == "decay" else 0.0
            if (move.admit or move.retain) and (decay or name in columns.extra):
                momentum = self.buffer(columns, name)[place]
                momentum.mul_(move.retain).add_(columns.before[place], alpha=move.admit * decay)
                out[row].add_(momentum, alpha=move.from_momentum)
            out[row].add_(columns.before[place], alpha=move.from_gradient * decay)

    def momentum(self, columns: Columns, segment: Segment) -> torch.Tensor:
        """Returns what the momenta of the parts and extras come to, `[n]`."""
        place = slice(segment.start, segment.stop)
        rows = (
            [] if columns.momenta is None else [columns.momenta[:, place].sum(0, dtype=columns.before.dtype)]
        )
        rows += [tensor[place].to(columns.before.dtype) for tensor in columns.extra.values()]
        return sum(rows[1:], rows[0]) if rows else torch.zeros_like(columns.before[place])

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
        rest = momentum - self.momentum(columns, segment)
        tolerance = max(math.sqrt(eps), self.rounding)
        if bool(rest.norm() <= tolerance * momentum.norm()):
            return
        if replaced:
            for name, tensor in (("momenta", columns.momenta), *columns.extra.items()):
                if tensor is not None and name != "carried":
                    tensor[..., segment.start : segment.stop] = 0
        self.set_carried(columns, segment, momentum)

    def set_carried(self, columns: Columns, segment: Segment, momentum: torch.Tensor) -> None:
        """Makes what an optimizer's momentum `[n]` has beyond the parts' the carried momentum."""
        self.carried_weight = 1.0
        rest = momentum - self.momentum(columns, segment)
        if "carried" in columns.extra or bool(rest.any()):
            self.buffer(columns, "carried")[segment.start : segment.stop] += rest

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

    def buffer(self, columns: Columns, key: str) -> torch.Tensor:
        """Returns a buffer of a block, made when it is first needed: before, momenta, decay, carried."""
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
