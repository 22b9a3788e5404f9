"""Neighbouring parameters whose numbers are turned into float64 together, a bounded number at a time.

Legend: C cells, n columns of one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.probes.reduction import Reduction

CPU_NUMBERS, DEVICE_NUMBERS = 1 << 19, 1 << 24
"""Numbers looked at together: few enough for a processor's cache, or enough to keep an accelerator busy."""


@dataclass(frozen=True)
class Segment:
    """Columns `start` to `stop` of a block.

    Attributes:
        parameters: Whose numbers they are; one alone where only a part of it fits.
        start: First column.
        stop: Column after the last.
        skip: Numbers of the parameter before `start`; 0 unless it is cut.
    """

    parameters: tuple[nn.Parameter, ...]
    start: int
    stop: int
    skip: int = 0

    def gather(
        self,
        tensor_of: Callable[[nn.Parameter], torch.Tensor | None],
        reduction: Reduction,
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """Returns tensors shaped like the parameters beside each other, `[n]`; None stands for 0."""
        tensors = []
        for parameter in self.parameters:
            tensor = tensor_of(parameter)
            tensors.append(torch.zeros_like(parameter) if tensor is None else tensor)
        if len(tensors) == 1:
            return reduction.local(tensors[0])[self.skip : self.skip + self.stop - self.start].to(dtype)
        return reduction.beside(tensors).to(dtype)


def segments_of(
    parameters: Sequence[nn.Parameter],
    sizes: Sequence[int],
    *,
    num_rows: int,
    device: torch.device,
    start: int = 0,
) -> list[Segment]:
    """Returns segments that cover all columns.

    Args:
        parameters: Parameters of a block, in order.
        sizes: Numbers of each.
        num_rows: Rows that are looked at together.
        device: Where they lie.
        start: Column of the first.
    """
    limit = max(1, (CPU_NUMBERS if device.type == "cpu" else DEVICE_NUMBERS) // num_rows)
    return list(_segments(parameters, sizes, limit, start))


def _segments(
    parameters: Sequence[nn.Parameter], sizes: Sequence[int], limit: int, start: int
) -> Iterator[Segment]:
    waiting: list[nn.Parameter] = []
    stop = start
    for parameter, size in zip(parameters, sizes, strict=True):
        if waiting and stop - start + size > limit:
            yield Segment(tuple(waiting), start, stop)
            waiting, start = [], stop
        if size > limit:
            for skip in range(0, size, limit):
                yield Segment((parameter,), start + skip, start + min(skip + limit, size), skip)
            start += size
        elif size:
            waiting.append(parameter)
        stop += size
    if waiting:
        yield Segment(tuple(waiting), start, stop)
