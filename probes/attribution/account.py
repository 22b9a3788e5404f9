"""The account of one optimizer step for one policy: taken before the step, settled after it.

Legend: C cells, A parts, M = A + 2 contributors, n numbers of one segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradscope.probes.accumulators import Block, SlotAccumulators
from gradscope.probes.attribution.ledger import Columns, Ledger, Mark
from gradscope.probes.attribution.result import Result
from gradscope.probes.attribution.rules import Move, Rule, groups_of
from gradscope.probes.segments import Segment, segments_of

Array = NDArray[np.float64]


CANCELLATION = 1e-12
"""Squared relative norm below which a difference of squares in double precision says nothing."""

Key = tuple[int, int]
"""Number of the optimizer's group, and the age of the parameter (`Rule.ages`)."""
TensorOf = Callable[[nn.Parameter], torch.Tensor | None]


@dataclass(frozen=True)
class Stretch:
    """A segment whose parameters belong to one group of the optimizer and have one age.

    Attributes:
        columns: Buffers of its block.
        sums: Sums of the block, `[C, P]`; None where no gradient was announced.
        segment: Which columns of them.
        key: Group and age.
    """

    columns: Columns
    sums: torch.Tensor | None
    segment: Segment
    key: Key


class Account:
    """One step of an optimizer on the parameters of a policy.

    Args:
        ledger: Momenta of the policy's parts.
        sums: Its sums.
        rule: How the optimizer moves parameters.
        optimizer: About to step.
        reference_norm: Norm that rounding in the sums is judged against.
        announced: Whether the sums are those of this step; else its gradient must be 0.
        usable: Whether they tell all about the gradient.
    """

    def __init__(
        self,
        ledger: Ledger,
        sums: SlotAccumulators,
        rule: Rule,
        optimizer: torch.optim.Optimizer,
        *,
        reference_norm: float,
        announced: bool,
        usable: bool,
    ) -> None:
        self.ledger = ledger
        self.sums = sums
        self.rule = rule
        self.optimizer = optimizer
        self._reduction = sums.reduction
        self._moves: dict[Key, Move] = {}
        self._stretches: list[Stretch] = []
        self._keep: dict[int, torch.Tensor] = {}
        blocks = sums.local_blocks() if announced else [None] * len(ledger.columns)
        looked = self._reduction.together(lambda: self._open(blocks))
        self._before = self._add(looked, (len(sums.cells.slots) + 4) ** 2)
        self._factor, self._foreign_square = self._compare(reference_norm, usable=usable)

    def settle(self, keep: Sequence[torch.Tensor] = ()) -> Result:
        """Moves the momenta and returns what the step came to; call it after the step.

        Args:
            keep: Where the contributions are kept, `[M, P]` for each block of the ledger; empty to drop them.
        """
        num_parts, ledger = self.ledger.num_parts, self.ledger
        size = 2 * num_parts + 4
        self._keep = {id(columns): kept for columns, kept in zip(ledger.columns, keep, strict=False)}
        moved = self._reduction.together(lambda: [self._move(stretch) for stretch in self._stretches])
        after = self._add(moved, size * size)
        checks = torch.stack([self._factor, self._foreign_square])
        # One copy to the host.
        numbers = torch.cat([after, self._before.to(after.device), checks.to(after.device)]).cpu().numpy()
        products, before = np.reshape(numbers[: size * size], (size, size)), numbers[size * size : -2]
        for stretch in self._stretches:
            ledger.marks |= self._marks(stretch)
        previous_square, ledger.previous_square = ledger.previous_square, float(products[-2, -2])
        ledger.fade(max((move.retain for move in self._moves.values()), default=1.0))
        mine = slice(num_parts, -2)
        return Result(
            products=products[mine, mine].copy(),
            effects=products[:num_parts, mine].copy(),
            change_norm=math.sqrt(products[-2, -2]),
            gap=math.sqrt(products[-1, -1]),
            factor=float(numbers[-2]),
            foreign=math.sqrt(numbers[-1]),
            **self._read_before(before, previous_square),
        )

    def _read_before(self, numbers: Array, previous_square: float) -> dict[str, Any]:
        """Returns what was looked at before the step, by the names of `Result`."""
        num_slots = len(self.sums.cells.slots)
        products = np.reshape(numbers, (num_slots + 4, -1))
        change_square, mean_square, drift_square = np.diag(products)[num_slots + 1 :]
        previous, mean = products[:num_slots, num_slots + 1], products[:num_slots, num_slots + 2]
        unmoved = math.isclose(change_square, previous_square, rel_tol=1e-6)
        return {
            "dot_previous": previous if unmoved else np.full_like(previous, np.nan),
            "dot_mean": mean if mean_square > 0 else np.full_like(mean, np.nan),
            "drift": math.sqrt(drift_square / mean_square) if mean_square else 0.0,
        }

    def _add(self, numbers: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Returns the sum of vectors that may lie on several devices, over all processes."""
        by_device: dict[torch.device, torch.Tensor] = {}
        for part in numbers:
            by_device[part.device] = by_device[part.device] + part if part.device in by_device else part
        first, *rest = by_device.values() or [torch.zeros(size, dtype=torch.float64)]
        return self._reduction.add_up(sum((part.to(first.device) for part in rest), first))

    def resync(self) -> None:
        """Makes carried momentum of what the optimizer's has beyond the parts'."""
        for stretch in self._stretches:
            self.ledger.set_carried(stretch.columns, stretch.segment, self._momentum(stretch))

    def _match(self) -> None:
        """Carries over momentum that the parts do not know: of before they were, or put there by others."""
        marks = self.ledger.marks
        for stretch in self._stretches:
            now = self._marks(stretch)
            strange = [p for p in now if p not in marks and (now[p] or stretch.columns.momenta is not None)]
            replaced = any(marks.get(p, now[p]) != now[p] for p in now)
            if replaced or strange:
                momentum = self._momentum(stretch)
                self.ledger.match(
                    stretch.columns, stretch.segment, momentum, self.sums.eps, replaced=replaced
                )

    def _marks(self, stretch: Stretch) -> dict[int, Mark]:
        """Returns what tells each parameter's momentum from another, or from itself when others change it."""
        tensor_of = self._state(self.rule.momentum)
        tensors = {id(p): tensor_of(p) for p in stretch.segment.parameters}
        return {p: None if tensor is None else (id(tensor), tensor._version) for p, tensor in tensors.items()}

    def _cut(self, blocks: Sequence[Block | None]) -> Iterator[Stretch]:
        """Yields the columns that the optimizer is about to move, in stretches."""
        groups, states = groups_of(self.optimizer), self.optimizer.state
        moved = [p for p in self.sums.policy.covered.values() if p in groups and p.grad is not None]
        ages = self.rule.ages([states.get(p, {}) for p in moved])
        keys = {p: (groups[p], age) for p, age in zip(moved, ages, strict=True)}
        self._moves = {
            key: self.rule.move(self.optimizer.param_groups[key[0]], key[1]) for key in set(keys.values())
        }
        num_rows = 4 * self.ledger.num_parts + len(self.sums.cells) + 8
        for block, columns in zip(blocks, self.ledger.columns, strict=True):
            stop = 0
            for key, run in groupby(
                zip(columns.parameters, columns.sizes, strict=True), lambda item: keys.get(item[0])
            ):
                parameters, sizes = zip(*run, strict=True)
                start, stop = stop, stop + sum(sizes)
                if key is None:
                    continue
                for segment in segments_of(
                    parameters, sizes, num_rows=num_rows, device=columns.before.device, start=start
                ):
                    yield Stretch(columns, None if block is None else block.sums, segment, key)

    def _open(self, blocks: Sequence[Block | None]) -> list[torch.Tensor]:
        """Does what is this process's own before the step; returns what it looked up."""
        self._stretches = list(self._cut(blocks))
        self._match()
        looked = self._look(self.ledger.previous_square)
        self.ledger.keep_parameters(self._reduction)
        return looked

    def _look(self, previous_square: float) -> list[torch.Tensor]:
        """Returns in vectors, to be added up, what is to be known of the gradient before the step.

        Products `[K + 4, K + 4]` among the gradients of the slots, the gradient, the last change, the
        optimizer's running mean, and what that has beyond the parts' momenta.
        """
        cells = self.sums.cells
        num_slots, products = len(cells.slots), []
        for stretch in self._stretches:
            rows = self._empty(stretch, num_slots + 4)
            if stretch.sums is None:
                rows[:num_slots] = 0.0
            else:
                by_cell = self._sums(stretch).unflatten(0, (cells.num_halves, num_slots, cells.num_labels))
                torch.sum(by_cell, (0, 2), out=rows[:num_slots])
            gradient, change, mean, drift = rows[num_slots:]
            gradient.copy_(self._gather(stretch, lambda p: p.grad))
            change.zero_()
            if not math.isnan(previous_square):
                torch.sub(self._kept(stretch), self._gather(stretch, lambda p: p), out=change)
            momentum = self._momentum(stretch)
            torch.mul(momentum, self._moves[stretch.key].sign, out=mean)
            torch.sub(momentum, self.ledger.momentum(stretch.columns, stretch.segment), out=drift)
            products.append(_products(rows))
        return products

    def _compare(self, reference_norm: float, *, usable: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the factor by which the gradient was scaled, and the squared relative norm of the rest.

        The factor is 0 where something else was done to the gradient than scaling it.
        """
        num_slots = len(self.sums.cells.slots)
        products = self._before.reshape(num_slots + 4, -1)
        gradient_square = products[num_slots, num_slots]
        product = products[:num_slots, num_slots].sum()
        total_square = products[:num_slots, :num_slots].sum()
        factor = torch.where(total_square > 0, product / total_square, 1.0)
        # Where both are rounding of what was added up, neither tells a factor.
        lost = torch.maximum(total_square, gradient_square) <= self.sums.eps * reference_norm**2
        factor = torch.where(lost, 1.0, factor)
        foreign_square = (gradient_square - factor * product).clamp(min=0.0)
        allowed = max(self.sums.eps, CANCELLATION) * factor**2 * total_square.clamp(min=reference_norm**2)
        scaled = lost | (foreign_square <= allowed)
        relative = torch.where(scaled, 0.0, foreign_square / gradient_square)
        scale = getattr(self.optimizer, "grad_scale", None)  # set by a GradScaler for fused optimizers
        if scale is not None:
            factor = factor / scale.to(factor.device, factor.dtype)
        return torch.where(scaled, factor, 0.0) * float(usable), relative

    def _move(self, stretch: Stretch) -> torch.Tensor:
        """Moves the momenta of a stretch.

        Returns:
            Products `[2A + 4, 2A + 4]` among gradients of the parts, contributions, change and gap, flat.
        """
        ledger, move, num_parts = self.ledger, self._moves[stretch.key], self.ledger.num_parts
        rows = self._empty(stretch, 2 * num_parts + 4)
        gradients, changes, (applied, gap) = rows[:num_parts], rows[num_parts:-2], rows[-2:]
        if stretch.sums is None:
            gradients.zero_()
        else:
            ledger.add_parts(self.sums.cells, self._sums(stretch), gradients)
        factor = self._factor.to(rows.device)
        ledger.advance(stretch.columns, stretch.segment, move, gradients, factor, changes)
        changes.mul_(move.scale(lambda name: self._gather(stretch, self._state(name))))
        if move.decoupled_decay:
            changes[num_parts].add_(self._kept(stretch), alpha=move.decoupled_decay)
        if id(stretch.columns) in self._keep:
            self._keep[id(stretch.columns)][:, stretch.segment.start : stretch.segment.stop] = changes
        torch.sub(self._kept(stretch), self._gather(stretch, lambda p: p), out=applied)
        torch.sub(changes.sum(0), applied, out=gap)
        return _products(rows)

    def _empty(self, stretch: Stretch, num_rows: int) -> torch.Tensor:
        segment = stretch.segment
        return stretch.columns.before.new_empty(num_rows, segment.stop - segment.start)

    def _kept(self, stretch: Stretch) -> torch.Tensor:
        return stretch.columns.before[stretch.segment.start : stretch.segment.stop]

    def _momentum(self, stretch: Stretch) -> torch.Tensor:
        return self._gather(stretch, self._state(self.rule.momentum))

    def _state(self, name: str) -> TensorOf:
        states = self.optimizer.state
        return lambda parameter: states.get(parameter, {}).get(name)

    def _gather(self, stretch: Stretch, tensor_of: TensorOf) -> torch.Tensor:
        return stretch.segment.gather(tensor_of, self._reduction, stretch.columns.before.dtype)

    def _sums(self, stretch: Stretch) -> torch.Tensor:
        assert stretch.sums is not None
        return stretch.sums[:, stretch.segment.start : stretch.segment.stop]


def _products(rows: torch.Tensor) -> torch.Tensor:
    """Returns the inner products of rows, in double precision, flat."""
    precise = rows.double()
    return (precise @ precise.T).flatten()
