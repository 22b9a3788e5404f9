"""One policy's gradients by cell between two optimizer steps, and the Gram matrix and checks taken from them.

Legend: C cells and K slots of the policy (`gradscope.probes.cells`), P numbers of its covered parameters. The
sums are cell-major, so that the Gram matrix of all parameters of one device and dtype is one product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gradscope.probes.cell_products import cell_products
from gradscope.probes.cells import Cells
from gradscope.probes.reduction import Reduction
from gradscope.probes.scaling import Scales
from gradscope.probes.segments import Segment, segments_of
from gradscope.probes.spans import Span, span_of
from gradscope.probes.summary import Summary
from gradscope.probes.targets import Policy
from gradscope.probes.terms import Terms


@dataclass(frozen=True)
class Block:
    """The sums `[C, P]` of the parameters of one device and dtype, in the order of `names`."""

    sums: torch.Tensor
    names: tuple[str, ...]


class SlotAccumulators:
    """Sums `[C, *shape]` of every covered parameter of one policy.

    They are float64 where the parameter is, float32 otherwise. Memory is taken when the first gradient
    arrives and kept from update to update.

    Args:
        policy: The policy.
        cells: Its cells to begin with.
        reduction: How they become those of the whole update.

    Attributes:
        closed: Whether the sums are those of an update that has its record; what arrives next starts anew.
        seen: Covered parameters, by identity, of which something arrived since the last reset.
        left_out: Covered parameters, by identity, of which this update cannot tell the slots apart.
        blocks: The sums; none before the first gradient.
        terms: Magnitude of what went into the sums.
        undivided: Slots of which some gradient is known as a whole only, not by half and label.
    """

    def __init__(self, policy: Policy, cells: Cells, reduction: Reduction) -> None:
        self.policy = policy
        self.cells = cells
        self.reduction = reduction
        self.closed = False
        self._gradient_scale, self._sums_scale = 1.0, 1.0
        self._dtypes: set[torch.dtype] = set()
        self.eps = max(torch.finfo(parameter.dtype).eps for parameter in policy.covered.values())
        self.left_out: set[int] = set()
        self.undivided: set[int] = set()
        self.seen: set[int] = set()
        self.blocks: list[Block] = []
        self._local: list[Block] | None = None
        self._stacked: dict[int, torch.Tensor] = {}
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._spans: dict[tuple[int, ...], Span] = {}
        self.terms = Terms()

    def stacked(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the sums `[C, *shape]` of a parameter, to be added to."""
        self._open()
        self.seen.add(id(parameter))
        return self._stacked[id(parameter)]

    def separate(self, parameter: nn.Parameter) -> tuple[torch.Tensor, ...]:
        """Returns the C sums of a parameter, each of its shape, to be added to."""
        self._open()
        self.seen.add(id(parameter))
        return self._views[id(parameter)]

    def leave_out(self, parameter: nn.Parameter) -> None:
        """Takes a parameter out of this update: its gradient holds slots that nobody can tell apart."""
        for sum_ in self.separate(parameter):
            sum_.zero_()
        self.left_out.add(id(parameter))

    def coverage(self) -> tuple[str, ...]:
        """Returns the trainable parameters that this update's products leave out."""
        left_out = (name for name, p in self.policy.covered.items() if id(p) in self.left_out)
        return (*self.policy.uncovered, *left_out)

    def receive(self, parameters: Sequence[nn.Parameter]) -> tuple[Span, bool]:
        """Opens the sums of one layer's parameters for what arrives.

        Returns:
            The sums, and whether they may be overwritten: nothing arrived for them since the last reset.
        """
        if self.closed or not self.blocks:
            self._open()
        key = tuple([id(parameter) for parameter in parameters])
        fresh = self.seen.isdisjoint(key)
        self.seen.update(key)
        if key not in self._spans:
            self._spans[key] = span_of([self._stacked[place] for place in key])
        return self._spans[key], fresh

    def halve(self) -> None:
        """Divides the cells by halves of the problems; what is there goes to the first half."""
        if self.cells.num_halves == 2:
            return
        before, self.blocks, self._local = self.blocks, [], None
        self.cells = self.cells.halved()
        if before:
            self._allocate()
            for old, new in zip(before, self.blocks, strict=True):
                new.sums[: len(old.sums)] = old.sums

    def note_precision(self, dtype: torch.dtype) -> None:
        """Remembers the rounding step of the coarsest type that went into the sums."""
        if dtype not in self._dtypes:
            self._dtypes.add(dtype)
            self.eps = max(self.eps, torch.finfo(dtype).eps)

    @property
    def empty(self) -> bool:
        """Whether nothing arrived since the last reset."""
        return not self.seen

    def gradients(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns copies of one slot's gradients by parameter name; zeros where nothing arrived.

        They are those of this process's rows, of the whole parameters.
        """
        self._allocate()
        cells = [] if self.closed else self.cells.of_slot(slot)
        return {name: self._stacked[id(p)][cells].sum(0) for name, p in self.policy.covered.items()}

    def rescale(self, scales: Scales) -> None:
        """Brings the sums to the units of the unscaled loss, and `.grad` too wherever it is read here."""
        self._gradient_scale, self._sums_scale = scales.gradients, scales.sums
        if scales.sums != 1:
            for block in self.blocks:
                block.sums.mul_(scales.sums)

    def close(self) -> None:
        """Keeps the sums as they are until something arrives or `reset`."""
        self.closed = True

    def reset(self) -> None:
        """Sets the sums to zero for the next update."""
        for block in self.blocks:
            block.sums.zero_()
        self.seen.clear()
        self.terms.clear()
        self._local = None
        self.left_out.clear()
        self.undivided.clear()
        self.closed = False

    def own_blocks(self) -> list[Block]:
        """Returns the blocks of this process alone, of whole parameters; takes their memory."""
        self._allocate()
        return self.blocks

    def local_blocks(self) -> list[Block]:
        """Returns the blocks over all processes, of the numbers that this process accounts for.

        They are added up over processes once and kept until something arrives or `reset`.
        """
        self._allocate()
        if self._local is None:
            covered = self.policy.covered
            self._local = [
                Block(self.reduction.local_sums(b.sums, [covered[name] for name in b.names]), b.names)
                for b in self.blocks
            ]
        return self._local

    def segments(self, block: Block, *, num_rows: int) -> list[Segment]:
        """Returns the columns of a local block in segments of which `num_rows` rows are looked at at once."""
        parameters = [self.policy.covered[name] for name in block.names]
        sizes = [self.reduction.local(parameter).numel() for parameter in parameters]
        return segments_of(parameters, sizes, num_rows=num_rows, device=block.sums.device)

    def summarise(self) -> Summary:
        """Returns the Gram matrix, and how the sum over cells compares with autograd's gradient."""
        self._agree_on_left_out()
        num_cells = len(self.cells)
        numbers = np.zeros(num_cells * num_cells + 2)
        blocks = self.local_blocks()
        for products in self.reduction.together(lambda: [self._products(block) for block in blocks]):
            # One copy to the host for each device and dtype.
            numbers += self.reduction.add_up(products).cpu().numpy()
        gram = numbers[:-2].reshape(num_cells, num_cells)
        gap_square, covered_square = (float(number) for number in numbers[-2:])
        left_out = (p for p in self.policy.covered.values() if id(p) in self.left_out)
        rest = [p.grad for p in (*self.policy.uncovered.values(), *left_out) if p.grad is not None]
        divisor = self.reduction.divisor(next(iter(self.policy.covered.values())))
        own = torch.stack([self._square(rest), torch.tensor(self.terms.square() / divisor**2).double()])
        rest_square, terms_square = self.reduction.add_up(own).tolist()
        return Summary(
            cells=self.cells,
            cell_gram=(gram + gram.T) / 2,
            grad_norm=math.sqrt(covered_square + rest_square * self._gradient_scale**2),
            covered_norm=math.sqrt(covered_square),
            gap=math.sqrt(gap_square),
            terms=math.sqrt(terms_square) * self._sums_scale,
        )

    def unseen(self) -> list[str]:
        """Returns the covered parameters with a nonzero gradient of which nothing arrived anywhere."""
        missing = {name: p for name, p in self.policy.covered.items() if id(p) not in self.seen}
        if not missing:
            return []
        squares = torch.stack(
            [self._square([p.grad] if p.grad is not None else []) for p in missing.values()]
        )
        found = self.reduction.add_up(squares).tolist()
        return [name for name, square in zip(missing, found, strict=True) if square != 0]

    def largest_gaps(self, number: int) -> list[tuple[str, float]]:
        """Returns the covered parameters whose sums differ most from autograd's gradient, and by how much."""
        names: list[str] = []
        squares: list[torch.Tensor] = []
        for block in self.local_blocks():
            parameters = [self.policy.covered[name] for name in block.names]
            sizes = [self.reduction.local(parameter).numel() for parameter in parameters]
            for parameter, sums in zip(parameters, block.sums.split(sizes, dim=1), strict=True):
                gradient = self._gradient(parameter)
                total = sums.sum(0)
                gap = total if gradient is None else total - self.reduction.local(gradient)
                squares.append(torch.linalg.vector_norm(gap, dtype=torch.float64).cpu() ** 2)
            names += block.names
        gaps = self.reduction.add_up(torch.stack(squares)).sqrt().tolist()
        return sorted(zip(names, gaps, strict=True), key=lambda item: -item[1])[:number]

    def _square(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the squared norm of the numbers of tensors that this process accounts for."""
        norms = [
            torch.linalg.vector_norm(self.reduction.local(t), dtype=torch.float64).cpu() for t in tensors
        ]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return None if id(parameter) in self.left_out else parameter.grad

    def _agree_on_left_out(self) -> None:
        """Leaves out of all processes what one of them leaves out."""
        parameters = list(self.policy.covered.values())
        flags = torch.tensor([float(id(p) in self.left_out) for p in parameters], dtype=torch.float64)
        for parameter, flag in zip(parameters, self.reduction.add_up(flags).tolist(), strict=True):
            if flag:
                self.leave_out(parameter)

    def _open(self) -> None:
        if self.closed:
            self.reset()
        self._local = None
        self._allocate()

    def _allocate(self) -> None:
        if self.blocks:
            return
        self._spans.clear()
        num_cells = len(self.cells)
        groups: dict[tuple[torch.device, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, parameter in self.policy.covered.items():
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            groups.setdefault((parameter.device, dtype), {})[name] = parameter
        for (device, dtype), parameters in groups.items():
            sizes = [parameter.numel() for parameter in parameters.values()]
            sums = torch.zeros(num_cells, sum(sizes), device=device, dtype=dtype)
            for parameter, columns in zip(parameters.values(), sums.split(sizes, dim=1), strict=True):
                self._stacked[id(parameter)] = columns.view(num_cells, *parameter.shape)
                self._views[id(parameter)] = tuple(self._stacked[id(parameter)])
            self.blocks.append(Block(sums, tuple(parameters)))

    def _products(self, block: Block) -> torch.Tensor:
        """Returns the C x C products, |sum over cells - gradient|^2, |gradient|^2 in one float64 vector."""
        num_cells = len(self.cells)
        result = torch.zeros(num_cells * num_cells + 2, device=block.sums.device, dtype=torch.float64)
        for segment in self.segments(block, num_rows=num_cells + 2):
            sums = block.sums[:, segment.start : segment.stop]
            gradient = segment.gather(self._gradient, self.reduction, sums.dtype)
            if self._gradient_scale != 1:
                gradient = gradient * self._gradient_scale
            result += cell_products(sums, gradient)
        return result
