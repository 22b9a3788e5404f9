"""Adds sums up over processes and leaves each process its part of every parameter.

A parameter is cut into W pieces of equal length, the last of which may be short or empty. Those of one rank
beside each other are the numbers that it accounts for, in sums, gradients, parameters and optimizer states.

Legend: C cells, P numbers of a block's parameters, W processes, m length of a parameter's first piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import distributed, nn

from gradscope.errors import ProbeError
from gradscope.probes.reduction import Reduction

T = TypeVar("T")

BUFFER_NUMBERS = 1 << 24
"""Numbers sent at a time, at most (64 MiB in float32): sending takes no memory of the size of the sums."""


@dataclass(frozen=True)
class Cut:
    """How the numbers of one parameter lie in the sums of a block and in the pieces.

    Attributes:
        start: Its first column in the block.
        numbers: How many columns it has.
        piece: Length of the first piece, m.
        divisor: What its gradient is divided by.
        axes: Sizes before, along and after the axis that is cut, where that is not the first; else None.
    """

    start: int
    numbers: int
    piece: int
    divisor: float
    axes: tuple[int, int, int] | None = None

    def length(self, rank: int) -> int:
        """Returns the length of a rank's piece."""
        return max(0, min(self.piece, self.numbers - rank * self.piece))

    def columns(self, sums_CP: torch.Tensor, size: int) -> torch.Tensor:
        """Returns the parameter's sums `[C, numbers]` with the numbers of each piece side by side."""
        columns = sums_CP[:, self.start : self.start + self.numbers]
        if self.axes is None:
            return columns
        before, along, after = self.axes
        pieces = columns.reshape(-1, before, size, along // size, after)
        return pieces.transpose(1, 2).reshape(len(columns), -1)


class Ranks(Reduction):
    """Processes that add up their gradients.

    Args:
        group: The processes among which parameters are cut.
        device: Where the parameters lie.
        copies: The processes that hold the same pieces, where there are any (hybrid sharding).
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        device: torch.device,
        copies: distributed.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._copies = copies
        self._device = device
        self._pieces = distributed.get_world_size(group)
        self._piece = distributed.get_rank(group)
        num_copies = 1 if copies is None else distributed.get_world_size(copies)
        self.size = self._pieces * num_copies
        self.rank = (
            self._piece if copies is None else distributed.get_rank(copies) * self._pieces + self._piece
        )

    def cut(self, parameter: nn.Parameter, start: int) -> Cut:
        """Returns how a parameter is cut, whose columns begin at `start`."""
        raise NotImplementedError

    def beside(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the numbers of several tensors that this process accounts for, beside each other."""
        return torch.cat([self.local(tensor) for tensor in tensors])

    def divisor(self, parameter: nn.Parameter) -> float:
        """Returns what the gradients of single processes are divided by when they are added up."""
        return self.cut(parameter, 0).divisor

    def local_sums(self, sums_CP: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Returns the sums over all processes, scaled like gradients, of this one's pieces.

        Args:
            sums_CP: This process's sums, the parameters of one block beside each other.
            parameters: Those parameters.

        Raises:
            ProbeError: Some process has no memory for it.
        """
        cuts, start = [], 0
        for parameter in parameters:
            cuts.append(self.cut(parameter, start))
            start += parameter.numel()
        num_cells = len(sums_CP)
        width = max(1, min(BUFFER_NUMBERS // (num_cells * self._pieces), sum(cut.piece for cut in cuts)))
        own = sum(cut.length(self._piece) for cut in cuts)
        result, sent, received = self.together(
            lambda: (
                sums_CP.new_empty(num_cells, own),
                sums_CP.new_empty(self._pieces * num_cells * width),
                sums_CP.new_empty(num_cells * width),
            )
        )
        place = 0
        for window in _windows(cuts, width):
            used = sum(part.stop - part.start for part in window)
            send = sent[: self._pieces * num_cells * used].view(self._pieces, num_cells, used)
            _fill(send, sums_CP, window)
            receive = received[: num_cells * used].view(num_cells, used)
            self._scatter(receive, send)
            place = self._keep(result, place, receive, window)
        return result

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns small float64 tensors added up over the parts that processes account for."""
        total = numbers.to(self._device, copy=True)
        distributed.all_reduce(total, group=self._group)
        return total.to(numbers.device)

    def gather(self, facts: T) -> list[T]:
        """Returns what each process says, in the order of ranks."""
        said = _gather(facts, self._group)
        if self._copies is None:
            return said
        return [one for part in _gather(said, self._copies) for one in part]

    def unanimous(self, vote: bool) -> bool:
        """Whether every process says yes."""
        against = torch.tensor(float(not vote), dtype=torch.float64, device=self._device)
        for group in (self._group, self._copies):
            if group is not None:
                distributed.all_reduce(against, group=group)
        return float(against) == 0

    def together(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns; it may fail on one process alone, and then all of them raise.

        Raises:
            ProbeError: It failed somewhere.
        """
        failure, result = "", None
        try:
            result = work()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if not self.unanimous(not failure):
            failures = [(rank, text) for rank, text in enumerate(self.gather(failure)) if text]
            rank, text = failures[0]
            raise ProbeError(f"on rank {rank} of {self.size}: {text}")
        return cast(T, result)

    def _scatter(self, receive: torch.Tensor, send: torch.Tensor) -> None:
        # Its name since torch 2.13 and the one before.
        scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        scatter(receive.view(-1), send.view(-1), group=self._group)
        if self._copies is not None:
            distributed.all_reduce(receive, group=self._copies)

    def _keep(self, result: torch.Tensor, place: int, received: torch.Tensor, window: Sequence[_Part]) -> int:
        """Copies what arrived to its place in the result; returns the place after it."""
        column = 0
        for part in window:
            numbers = max(0, min(part.stop, part.cut.length(self._piece)) - part.start)
            arrived = received[:, column : column + numbers]
            torch.div(arrived, part.cut.divisor, out=result[:, place : place + numbers])
            place += numbers
            column += part.stop - part.start
        return place


@dataclass(frozen=True)
class _Part:
    """Numbers `start` to `stop` of every piece of a parameter."""

    cut: Cut
    start: int
    stop: int


def _windows(cuts: Sequence[Cut], width: int) -> Iterator[list[_Part]]:
    """Returns what is sent together, at most `width` numbers of each process."""
    window: list[_Part] = []
    room = width
    for cut in cuts:
        start = 0
        while start < cut.piece:
            stop = min(cut.piece, start + room)
            window.append(_Part(cut, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield window
                window, room = [], width
    if window:
        yield window


def _fill(send_WCn: torch.Tensor, sums_CP: torch.Tensor, window: Sequence[_Part]) -> None:
    size = len(send_WCn)
    column = 0
    for part in window:
        cut, numbers = part.cut, part.stop - part.start
        columns = cut.columns(sums_CP, size)
        into = send_WCn[:, :, column : column + numbers]
        if cut.numbers == cut.piece * size:
            pieces = columns.unflatten(1, (size, cut.piece))
            into.copy_(pieces[:, :, part.start : part.stop].transpose(0, 1))
        else:
            into.zero_()
            for rank in range(size):
                there = max(0, min(part.stop, cut.length(rank)) - part.start)
                first = rank * cut.piece + part.start
                into[rank, :, :there] = columns[:, first : first + there]
        column += numbers


def _gather(facts: T, group: distributed.ProcessGroup) -> list[T]:
    said: list[T | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(said, facts, group=group)
    return said  # type: ignore[return-value]
