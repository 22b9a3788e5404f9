"""How one process's tensors and numbers become those of the whole update; here, of a single process.

Everything that reads sums, gradients, parameters or optimizer states goes through here, so that data-parallel
training needs another reduction and nothing else.
"""

from __future__ import annotations

import torch

from gradscope.probes.cells import Halves


class Reduction:
    """A single process: its tensors are whole and its numbers are all there are."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the numbers that this process accounts for, flat.

        Args:
            tensor: A parameter, or a tensor of its shape: its gradient or a state of its optimizer.
        """
        return tensor.detach().reshape(-1)

    def local_sums(self, sums_CP: torch.Tensor, shapes: list[torch.Size]) -> torch.Tensor:
        """Returns the sums over all processes of the numbers that this one accounts for.

        Args:
            sums_CP: This process's sums, the parameters of one block beside each other.
            shapes: Shapes of those parameters.
        """
        return sums_CP

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns small float64 tensors added up over all processes."""
        return numbers

    def halves(self) -> Halves:
        """Returns what divides one policy's problems into halves."""
        return Halves()
