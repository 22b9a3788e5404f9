"""How one process's tensors and numbers become those of the whole update; here, of a single process.

Everything that reads sums, gradients, parameters or optimizer states goes through here, so that data-parallel
training needs another reduction (`gradscope.probes.distributed`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors

T = TypeVar("T")


class Reduction:
    """A single process: its tensors are whole and its numbers are all there are.

    Attributes:
        size: Number of processes.
        rank: Place of this one among them.
        eps: Rounding step of the type in which gradients are added up; 0 where nothing is rounded.
    """

    size = 1
    rank = 0
    eps = 0.0

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the numbers that this process accounts for, flat.

        Args:
            tensor: A parameter, or a tensor of its shape: its gradient or a state of its optimizer.
        """
        return tensor.detach().reshape(-1)

    def beside(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the numbers of several such tensors, beside each other."""
        flat: torch.Tensor = _flatten_dense_tensors(tensors)
        return flat.detach()

    def local_sums(self, sums_CP: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Returns the sums over all processes of the numbers that this one accounts for.

        Args:
            sums_CP: This process's sums, the parameters of one block beside each other.
            parameters: Those parameters.
        """
        return sums_CP

    def divisor(self, parameter: nn.Parameter) -> float:
        """Returns what the gradients of single processes are divided by when they are added up."""
        return 1.0

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns small float64 tensors added up over the parts that processes account for."""
        return numbers

    def gather(self, facts: T) -> list[T]:
        """Returns what each process says, in the order of ranks."""
        return [facts]

    def unanimous(self, vote: bool) -> bool:
        """Whether every process says yes."""
        return vote

    def together(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns; it may fail on one process alone, and then all of them raise."""
        return work()
