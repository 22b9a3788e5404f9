"""One policy's slot gradients between two optimizer steps, and the Gram matrix and checks taken from them.

Legend: K slots of the policy, P numbers of its covered parameters. The sums are slot-major, so that the Gram
matrix of all parameters of one device and dtype is one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradscope.probes.targets import Policy

CHUNK = 1 << 20
"""Columns turned into float64 at a time."""


@dataclass(frozen=True)
class Block:
    """The sums `[K, P]` of the parameters of one device and dtype, in the order of `names`."""

    sums: torch.Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """What an update comes to.

    Attributes:
        gram: Inner products of the slot gradients, `[K, K]`, float64.
        grad_norm: Norm of what autograd left in `.grad`, over all trainable parameters of the policy.
        covered_norm: The same over covered parameters.
        gap: Norm of (sum of the slot gradients - what autograd left), over covered parameters.
    """

    gram: NDArray[np.float64]
    grad_norm: float
    covered_norm: float
    gap: float

    @property
    def residual(self) -> float:
        """`gap` relative to `covered_norm`; NaN where that is not finite, 0 where both are 0."""
        if not math.isfinite(self.covered_norm):
            return math.nan
        if self.covered_norm == 0:
            return 0.0 if self.gap == 0 else math.inf
        return self.gap / self.covered_norm

    @property
    def finite_norm(self) -> float:
        """The larger of `covered_norm` and the root of the summed squares of the slots; 0 where not finite.

        Slots may cancel in the sum, so that rounding is measured against what was added up.
        """
        norm = max(self.covered_norm, math.sqrt(max(float(np.trace(self.gram)), 0.0)))
        return norm if math.isfinite(norm) else 0.0


class SlotAccumulators:
    """Sums `[K, *shape]` of every covered parameter of one policy.

    They are float64 where the parameter is, float32 otherwise. Memory is taken when the first gradient
    arrives and kept from update to update.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._dtypes: set[torch.dtype] = set()
        self.eps = max(torch.finfo(parameter.dtype).eps for parameter in policy.covered.values())
        self._seen: set[int] = set()
        self._blocks: list[Block] = []
        self._slots: dict[int, torch.Tensor] = {}
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def stacked(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the sums `[K, *shape]` of a parameter, to be added to."""
        if not self._blocks:
            self._allocate()
        self._seen.add(id(parameter))
        return self._slots[id(parameter)]

    def separate(self, parameter: nn.Parameter) -> tuple[torch.Tensor, ...]:
        """Returns the K sums of a parameter, each of its shape, to be added to."""
        self._allocate()
        self._seen.add(id(parameter))
        return self._views[id(parameter)]

    def note_precision(self, dtype: torch.dtype) -> None:
        """Remembers the rounding step of the coarsest type that went into the sums."""
        if dtype not in self._dtypes:
            self._dtypes.add(dtype)
            self.eps = max(self.eps, torch.finfo(dtype).eps)

    @property
    def empty(self) -> bool:
        """Whether nothing arrived since the last reset."""
        return not self._seen

    def gradients(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns copies of one slot's gradients by parameter name; zeros where nothing arrived."""
        self._allocate()
        return {name: self._views[id(p)][slot].clone() for name, p in self.policy.covered.items()}

    def reset(self) -> None:
        """Sets the sums to zero for the next update."""
        for block in self._blocks:
            block.sums.zero_()
        self._seen.clear()

    def summarise(self) -> Summary:
        """Returns the Gram matrix, and how the sum over slots compares with autograd's gradient."""
        self._allocate()
        num_slots = len(self.policy.slots)
        gram, gap_square, covered_square = np.zeros((num_slots, num_slots)), 0.0, 0.0
        for block in self._blocks:
            # One copy to the host for each device and dtype.
            numbers = _products(block.sums, self._autograd_gradient(block)).cpu().numpy()
            gram += numbers[:-2].reshape(num_slots, num_slots)
            gap_square += float(numbers[-2])
            covered_square += float(numbers[-1])
        rest = [p.grad for p in self.policy.uncovered.values() if p.grad is not None]
        rest_square = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in rest)
        return Summary(
            gram=(gram + gram.T) / 2,
            grad_norm=math.sqrt(covered_square + rest_square),
            covered_norm=math.sqrt(covered_square),
            gap=math.sqrt(gap_square),
        )

    def unseen(self) -> list[str]:
        """Returns the covered parameters with a nonzero gradient of which nothing arrived here."""
        return [
            name
            for name, parameter in self.policy.covered.items()
            if id(parameter) not in self._seen and parameter.grad is not None and bool(parameter.grad.any())
        ]

    def largest_gaps(self, number: int) -> list[tuple[str, float]]:
        """Returns the covered parameters whose sums differ most from autograd's gradient, and by how much."""
        gaps = []
        for name, parameter in self.policy.covered.items():
            total = self._slots[id(parameter)].sum(0)
            gap = total if parameter.grad is None else total - parameter.grad
            gaps.append((name, float(torch.linalg.vector_norm(gap))))
        return sorted(gaps, key=lambda item: -item[1])[:number]

    def _allocate(self) -> None:
        if self._blocks:
            return
        num_slots = len(self.policy.slots)
        groups: dict[tuple[torch.device, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, parameter in self.policy.covered.items():
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            groups.setdefault((parameter.device, dtype), {})[name] = parameter
        for (device, dtype), parameters in groups.items():
            sizes = [parameter.numel() for parameter in parameters.values()]
            sums = torch.zeros(num_slots, sum(sizes), device=device, dtype=dtype)
            for parameter, columns in zip(parameters.values(), sums.split(sizes, dim=1), strict=True):
                self._slots[id(parameter)] = columns.view(num_slots, *parameter.shape)
                self._views[id(parameter)] = tuple(self._slots[id(parameter)])
            self._blocks.append(Block(sums, tuple(parameters)))

    def _autograd_gradient(self, block: Block) -> torch.Tensor:
        parameters = [self.policy.covered[name] for name in block.names]
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
        )


def _products(sums_KP: torch.Tensor, gradient_P: torch.Tensor) -> torch.Tensor:
    """Returns the K x K products, |sum over slots - gradient|^2 and |gradient|^2 in one float64 vector."""
    num_slots = sums_KP.shape[0]
    result = torch.zeros(num_slots * num_slots + 2, device=sums_KP.device, dtype=torch.float64)
    for start in range(0, sums_KP.shape[1], CHUNK):
        sums = sums_KP[:, start : start + CHUNK].double()
        gradient = gradient_P[start : start + CHUNK].double()
        gap = sums.sum(0) - gradient
        result[:-2] += (sums @ sums.T).flatten()
        result[-2] += gap @ gap
        result[-1] += gradient @ gradient
    return result
