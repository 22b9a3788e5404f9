"""The account of one optimizer step for one policy: taken before the step, settled after it.

Legend: C cells, A parts, M = A + 2 contributors, n numbers of one segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

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
        self._before = self._add(looked, 5 + 2 * len(sums.cells))
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
        after = self._add(moved, size * size + 2)
        # One copy to the host for each of the two.
        *squares, drift_square, momentum_square = after.cpu().numpy()
        *dots, factor, foreign_square = (
            torch.cat([self._before[3:], torch.stack([self._factor, self._foreign_square])]).cpu().numpy()
        )
        for stretch in self._stretches:
            ledger.marks |= self._marks(stretch)
        products = np.reshape(squares, (size, size))
        previous_square, ledger.previous_square = ledger.previous_square, float(products[-2, -2])
        ledger.fade(max((move.retain for move in self._moves.values()), default=1.0))
        mine = slice(num_parts, -2)
        return Result(
            products=products[mine, mine].copy(),
            effects=products[:num_parts, mine].copy(),
            change_norm=math.sqrt(products[-2, -2]),
            gap=math.sqrt(products[-1, -1]),
            factor=float(factor),
            foreign=math.sqrt(foreign_square),
            drift=math.sqrt(drift_square / momentum_square) if momentum_square else 0.0,
            **self._read_dots(np.asarray(dots), previous_square),
        )

    def _read_dots(self, dots: Array, previous_square: float) -> dict[str, Array]:
        """Returns the products with earlier changes by name; NaN where the parameters moved otherwise."""
        change_square, mean_square, *products = dots
        previous, mean = np.reshape(products, (-1, 2)).T
        unmoved = math.isclose(change_square, previous_square, rel_tol=1e-6)
        return {
            "dot_previous": previous if unmoved else np.full_like(previous, np.nan),
            "dot_mean": mean if mean_square > 0 else np.full_like(mean, np.nan),
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

        |gradient|^2, <gradient, sums>, |sums|^2; |last change|^2, |running mean|^2; products `[C, 2]` of the
        cells with the two.
        """
        parts = []
        for stretch in self._stretches:
            gradient = self._gather(stretch, lambda p: p.grad)
            sums, segment = self._sums(stretch), stretch.segment
            total = sums.sum(0)
            change = torch.zeros_like(gradient)
            if not math.isnan(previous_square):
                change = stretch.columns.before[segment.start : segment.stop] - self._gather(
                    stretch, lambda p: p
                )
            earlier = torch.stack([change, self._momentum(stretch) * self._moves[stretch.key].sign])
            both = torch.stack([gradient, total])
            parts.append(
                torch.cat(
                    [
                        (both @ both.T).flatten()[[0, 1, 3]],
                        earlier.square().sum(1),
                        (sums @ earlier.T).flatten(),
                    ]
                )
            )
        return parts

    def _compare(self, reference_norm: float, *, usable: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the factor by which the gradient was scaled, and the squared relative norm of the rest.

        The factor is 0 where something else was done to the gradient than scaling it.
        """
        gradient_square, product, total_square = self._before[:3]
        factor = torch.where(total_square > 0, product / total_square, 1.0)
        foreign_square = (gradient_square - factor * product).clamp(min=0.0)
        allowed = max(self.sums.eps, CANCELLATION) * factor**2 * total_square.clamp(min=reference_norm**2)
        scaled = foreign_square <= allowed
        relative = torch.where(scaled, 0.0, foreign_square / gradient_square)
        scale = getattr(self.optimizer, "grad_scale", None)  # set by a GradScaler for fused optimizers
        if scale is not None:
            factor = factor / scale.to(factor.device, factor.dtype)
        return torch.where(scaled, factor, 0.0) * float(usable), relative

    def _move(self, stretch: Stretch) -> torch.Tensor:
        """Moves the momenta of a stretch.

        Returns:
            In one vector: products among gradients of the parts, contributions, change and gap
            `[2A + 4, 2A + 4]`; |drift|^2 of the momentum, and |momentum|^2.
        """
        ledger, move, segment = self.ledger, self._moves[stretch.key], stretch.segment
        membership = ledger.membership(self.sums, stretch.columns.before.device)
        gradients = membership @ self._sums(stretch)
        before = stretch.columns.before[segment.start : segment.stop].double()
        scale = move.scale(lambda name: self._gather(stretch, self._state(name)))
        changes, known = ledger.advance(
            stretch.columns, segment, move, gradients * self._factor.to(gradients.device), before, scale
        )
        if id(stretch.columns) in self._keep:
            self._keep[id(stretch.columns)][:, segment.start : segment.stop] = changes
        applied = before - self._gather(stretch, lambda p: p)
        rows = torch.cat([gradients, changes, applied[None], (changes.sum(0) - applied)[None]])
        momentum = self._momentum(stretch) if move.retain or move.admit else known
        checks = torch.stack([momentum - known, momentum]).square().sum(1)
        return torch.cat([(rows @ rows.T).flatten(), checks])

    def _momentum(self, stretch: Stretch) -> torch.Tensor:
        return self._gather(stretch, self._state(self.rule.momentum))

    def _state(self, name: str) -> TensorOf:
        states = self.optimizer.state
        return lambda parameter: states.get(parameter, {}).get(name)

    def _gather(self, stretch: Stretch, tensor_of: TensorOf) -> torch.Tensor:
        return stretch.segment.gather(tensor_of, self._reduction)

    def _sums(self, stretch: Stretch) -> torch.Tensor:
        segment = stretch.segment
        if stretch.sums is None:
            size = segment.stop - segment.start
            return stretch.columns.before.new_zeros(len(self.sums.cells), size, dtype=torch.float64)
        return stretch.sums[:, segment.start : segment.stop].double()
