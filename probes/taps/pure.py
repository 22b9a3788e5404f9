"""Hooks on parameters: a backward that holds rows of one slot only gives that slot the whole gradient.

They serve every type of parameter, whatever its module does with it. A hook sees the gradient of one
backward before it is added to `.grad`. Whose it is, is known from the outputs of the modules around the
parameter: those that the backward went through say which rows they came from. Where these belong to several
slots the parameter is left out of the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.capture import Collector
from gradscope.probes.taps.whole import add_whole, slots_of
from gradscope.probes.targets import Hooked


class Handle(Protocol):
    """Takes off again what was put on."""

    def remove(self) -> None:
        """Takes it off; the model is as it was before."""


def place_hooks(
    model: nn.Module, hooked: Iterable[Hooked], collector: Collector, *, strict: bool
) -> list[Handle]:
    """Puts hooks on parameters, and marks on the outputs of the modules that hold them.

    Args:
        model: The probed model.
        hooked: The parameters.
        collector: What the hooks share.
        strict: Whether a backward that mixes slots is a failure; else the parameter is left out.
    """
    placed = {
        id(one.parameter): Placed(one.parameter, _hook(one, collector, strict=strict)) for one in hooked
    }
    handles: list[Handle] = [
        module.register_forward_hook(
            Mark(collector, _own(module, placed), outermost=module is model), with_kwargs=True
        )
        for module in _holders(model, placed.keys())
    ]
    return [*handles, *placed.values()]


class Placed:
    """A hook on a parameter, which goes along when another tensor takes the parameter's place.

    FSDP2 computes with whole parameters that stand on the modules during forward passes only.
    """

    def __init__(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        self._tensor: torch.Tensor = parameter
        self._hook = hook
        self._handle = parameter.register_hook(hook)

    def follow(self, tensor: torch.Tensor | None) -> None:
        """Moves to the tensor that a forward pass used."""
        if tensor is not None and tensor is not self._tensor and tensor.requires_grad:
            self._handle.remove()
            self._tensor, self._handle = tensor, tensor.register_hook(self._hook)

    def remove(self) -> None:
        """Takes the hook off."""
        self._handle.remove()


def _own(module: nn.Module, placed: Mapping[int, Placed]) -> list[tuple[nn.Module, str, Placed]]:
    """Returns the hooked parameters of a module, those of its parameter dictionaries included."""
    parts = (nn.ParameterDict, nn.ParameterList)
    holders = [module, *(child for child in module.children() if isinstance(child, parts))]
    return [
        (holder, key, placed[id(parameter)])
        for holder in holders
        for key, parameter in holder._parameters.items()
        if id(parameter) in placed
    ]


def _holders(model: nn.Module, wanted: Collection[int]) -> list[nn.Module]:
    """Returns the modules that hold one of the parameters, directly or further inside."""
    return [
        module
        for module in model.modules()
        if any(id(parameter) in wanted for parameter in module.parameters())
    ]


class Mark:
    """Forward hook that lets the outputs of a module say, in the backward, from which rows they are."""

    def __init__(
        self, collector: Collector, own: Sequence[tuple[nn.Module, str, Placed]], *, outermost: bool
    ) -> None:
        self.collector = collector
        self.own = own
        self.outermost = outermost

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Marks every tensor of the output that autograd will pass."""
        rows, unknown = self.collector.rows, self.collector.rows_unknown
        if rows is not None and self.outermost:
            shapes = (x.shape for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            rows.see(next(shapes, ()))  # rows count whether or not a backward comes
        if not torch.is_grad_enabled():
            return
        for holder, key, placed in self.own:
            placed.follow(holder._parameters.get(key))
        if rows is not None:
            rows.tapped = True
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(_arrival(self.collector, rows, unknown=unknown))


def _arrival(collector: Collector, rows: RowBatch | None, *, unknown: bool) -> Callable[[torch.Tensor], None]:
    def arrived(gradient: torch.Tensor) -> None:
        collector.arrivals.setdefault(torch._C._current_graph_task_id(), set()).add((rows, unknown))

    return arrived


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):  # the outputs of transformers are
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _hook(one: Hooked, collector: Collector, *, strict: bool) -> Callable[[torch.Tensor], None]:
    def take(gradient: torch.Tensor) -> None:
        if collector.failure is not None:
            return
        begin = time.perf_counter()
        try:
            _take(one, collector, gradient.detach(), strict=strict)
        except Exception as error:  # raised by step(), never inside a backward
            collector.fail(str(error) if isinstance(error, ProbeError) else f"{one.name}: {error!r}")
        collector.seconds += time.perf_counter() - begin

    return take


def _take(one: Hooked, collector: Collector, gradient: torch.Tensor, *, strict: bool) -> None:
    """Adds the gradient of one backward to the slot that it belongs to.

    Raises:
        ProbeError: Its rows are not known, or of several slots where that is a failure.
    """
    arrived = collector.arrivals.get(torch._C._current_graph_task_id(), set())
    if not arrived or any(rows is None for rows, _ in arrived):
        how = "by no module call that shows its rows" if not arrived else "by a forward pass outside rows()"
        if any(unknown for _, unknown in arrived):
            how = "by a forward pass that ran inside a backward pass (an unknown kind of checkpointing)"
        raise ProbeError(f"'{one.name}' got a gradient {how}, so the slot it belongs to is unknown.")
    into = collector.sums[one.policy]
    batches = [rows for rows, _ in arrived if rows is not None]
    slots = slots_of(batches)
    if len(slots) > 1 and strict:
        names = sorted(batches[0].names[slot] for slot in slots)
        raise ProbeError(
            f"one backward pass held the rows of {', '.join(names)}; mode 'pure' takes one backward pass for "
            "each slot. Call backward() for each micro-batch, or use mode 'auto'."
        )
    into.note_precision(gradient.dtype)
    add_whole(into, into.policy.covered[one.name], batches, gradient)


def check_one_slot(batch: RowBatch) -> None:
    """Checks that a micro-batch fits mode `pure`.

    Raises:
        ProbeError: It holds rows of several slots.
    """
    if len(batch.slots) > 1:
        names = ", ".join(batch.names[slot] for slot in sorted(batch.slots))
        raise ProbeError(
            f"rows(): got rows of {names} in one micro-batch; mode 'pure' takes rows of one slot each. Sort "
            "the rows by slot into micro-batches, or attach with mode 'auto'."
        )
