"""How large the terms are that gradients are added up from: what rounding is judged by where sums cancel.

Rows of opposite advantage may cancel within a slot, so that the sums and autograd's gradient are both left
with rounding of the terms dy_t x_t', and differ by as much as they are. The root of the terms' summed
squares, sqrt(sum_t |dy_t|^2 |x_t|^2), is estimated from some tokens as sqrt(T mean |dy_t|^2 mean |x_t|^2).

Legend: T tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

SAMPLE = 32
"""Tokens of a call that are looked at, about: an order of magnitude is wanted, at no cost."""
FOLD = 8192
"""Products whose numbers are kept apart; then they are added up, and a backward waits for its device."""


class _Call(NamedTuple):
    """One product of a call: the norms of the sampled rows, and what makes their square that of the terms."""

    left: torch.Tensor
    right: torch.Tensor | None
    weight: float


class Terms:
    """The summed squares of the terms of one policy's update."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._square = 0.0

    def note(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Notes the products dy' x of one call of a layer.

        Args:
            pairs: For each parameter dy `[T, O]`, and x `[T, I]` or None for a bias.
        """
        stride = max(1, len(pairs[0][0]) // SAMPLE) | 1  # odd, or it would meet the same places of all rows
        flat = [tensor[::stride] for pair in pairs for tensor in pair if tensor is not None]
        dtype = torch.float64 if flat[0].dtype == torch.float64 else torch.float32
        norms = iter(torch._foreach_norm(flat, 2, dtype=dtype))
        for left, right in pairs:
            num, num_sampled = len(left), -(-len(left) // stride)
            weight = num / num_sampled if right is None else num / num_sampled**2
            self._calls.append(_Call(next(norms), None if right is None else next(norms), weight))
        if len(self._calls) >= FOLD:
            self._fold()

    def square(self) -> float:
        """Returns the summed squares so far."""
        self._fold()
        return self._square

    def clear(self) -> None:
        """Starts anew."""
        self._calls.clear()
        self._square = 0.0

    def _fold(self) -> None:
        """Adds up; one copy to the host for each device."""
        for _, calls in itertools.groupby(self._calls, lambda call: call.left.device):
            found = list(calls)
            norms = torch.stack(
                [norm for call in found for norm in (call.left, call.right) if norm is not None]
            ).tolist()
            numbers = iter(norms)
            for call in found:
                norm = next(numbers) * (1.0 if call.right is None else next(numbers))
                self._square += call.weight * norm**2
        self._calls.clear()
        if not math.isfinite(self._square):
            self._square = 0.0
