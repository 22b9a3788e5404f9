"""A tap on TRL's fused language-model head, which multiplies by the head's weight without calling the head.

Where that weight is trained (full fine-tuning; tied embeddings), the gradient that comes back to the head's
outputs is all that is needed: the head is run again on the positions of one cell at a time, with a weight of
its own. The loss's own pass is left as it is.

Legend: B rows, T tokens of a row, N positions that the head scores, D features.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import nn

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import UNTAGGED, RowBatch
from gradscope.probes.scope import Scope
from gradscope.probes.taps.capture import Collector

FUNCTION = "_ChunkedLogProbFunction"
"""TRL's name of the autograd function of its fused head."""

Outputs = tuple[torch.Tensor | None, ...]


@contextmanager
def tapped_head(scope: Scope, model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Covers the head's weight and bias in forward passes of `model` inside the block.

    Args:
        scope: Measures the model.
        model: The model as the trainer holds it.
        inputs: The micro-batch as TRL's loss gets it, rows `[B, T]` in two parts.
    """
    head = head_of(model)
    collector = scope._collector
    covered = {
        name: (parameter, sums)
        for name in ("weight", "bias")
        if (parameter := getattr(head, name, None)) is not None and parameter.requires_grad
        for sums in collector.sums.values()
        if any(parameter is one for one in sums.policy.covered.values())
    }
    if not covered:
        yield
        return
    own = getattr(trl_utils, FUNCTION)
    setattr(trl_utils, FUNCTION, TappedHead(own, collector, covered, inputs))
    try:
        yield
    finally:
        setattr(trl_utils, FUNCTION, own)


def head_of(model: Any) -> Any:
    """Returns the language-model head of a model of transformers, adapted or not."""
    return model.get_output_embeddings()


@dataclass(frozen=True)
class TappedHead:
    """Stands in for TRL's autograd function.

    Attributes:
        function: TRL's own.
        collector: Of the scope.
        covered: `weight` and `bias`, those that are covered, with their sums.
        inputs: The micro-batch.
    """

    function: Any
    collector: Collector
    covered: Mapping[str, tuple[nn.Parameter, SlotAccumulators]]
    inputs: Mapping[str, Any]

    def apply(
        self,
        hidden_ND: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels_N: torch.Tensor,
        *settings: Any,
    ) -> Outputs:
        """Returns TRL's outputs, tapped."""
        outputs: Outputs = self.function.apply(hidden_ND, weight, bias, labels_N, *settings)
        batch = self.collector.rows
        if batch is None or not torch.is_grad_enabled():
            return outputs
        batch.tapped = True
        again = Again(self, batch, weight.detach(), None if bias is None else bias.detach(), settings)
        places = [place for place, one in enumerate(outputs) if one is not None and one.requires_grad]
        tapped = _Identity.apply(again, places, hidden_ND.detach(), labels_N, *(outputs[at] for at in places))
        found = dict(zip(places, tapped, strict=True))
        return tuple(found.get(place, one) for place, one in enumerate(outputs))

    def positions(self, num_positions: int, num_rows: int) -> list[range]:
        """Returns the positions of each row, in TRL's order: row by row.

        All but a row's last token are scored; on an accelerator only those before a completion's tokens.

        Raises:
            ProbeError: The number of positions fits neither.
        """
        per_row = self.inputs["prompt_ids"].shape[1] + self.inputs["completion_ids"].shape[1] - 1
        lengths = [per_row] * num_rows
        if sum(lengths) != num_positions:
            lengths = self.inputs["completion_mask"].sum(1).tolist()
        if sum(lengths) != num_positions or len(lengths) != num_rows:
            raise ProbeError(
                f"TRL's fused head scored {num_positions} positions of {num_rows} rows, which are neither "
                "all positions nor those of the completions; is this a version of TRL other than 1.16?"
            )
        starts = [0, *accumulate(lengths)]
        return [range(start, stop) for start, stop in pairwise(starts)]


@dataclass(frozen=True)
class Again:
    """What it takes to run the head again on some positions.

    Attributes:
        tap: Who asks.
        batch: The micro-batch.
        weight: The head's weight as the forward pass used it.
        bias: Its bias.
        settings: What else TRL's function takes.
    """

    tap: TappedHead
    batch: RowBatch
    weight: torch.Tensor
    bias: torch.Tensor | None
    settings: tuple[Any, ...]

    def collect(self, arrived: Arrived) -> None:
        """Adds each cell's gradient of the weight and the bias; never raises."""
        collector = self.tap.collector
        if collector.failure is not None:
            return
        begin = time.perf_counter()
        try:
            self._add(arrived, self.batch, {name: sums for name, (_, sums) in self.tap.covered.items()})
            if collector.row_meter is not None:
                collector.row_meter.add(
                    self.batch,
                    [parameter for parameter, _ in self.tap.covered.values()],
                    lambda rows, into: self._add(arrived, rows, dict.fromkeys(self.tap.covered, into)),
                )
        except Exception as error:  # raised by step(), never inside a backward
            collector.fail(str(error) if isinstance(error, ProbeError) else f"TRL's fused head: {error!r}")
        collector.seconds += time.perf_counter() - begin

    def _add(self, arrived: Arrived, batch: RowBatch, sums_of: Mapping[str, SlotAccumulators]) -> None:
        """Adds the gradients to the cells of a division of the rows."""
        positions = self.tap.positions(len(arrived.hidden), len(batch))
        for cell in dict.fromkeys(batch.cell_N):
            if cell == UNTAGGED or not any(cell in sums.cells.local for sums in sums_of.values()):
                continue
            rows = [row for row, own in enumerate(batch.cell_N) if own == cell]
            found = self._gradients(arrived.take([at for row in rows for at in positions[row]]))
            for name, gradient in found.items():
                sums = sums_of[name]
                sums.note_precision(arrived.hidden.dtype)
                sums.separate(self.tap.covered[name][0])[sums.cells.local[cell]].add_(gradient)

    def _gradients(self, arrived: Arrived) -> dict[str, torch.Tensor]:
        leaves = {"weight": self.weight, "bias": self.bias}
        wanted = {
            name: leaf.detach().requires_grad_()
            for name, leaf in leaves.items()
            if leaf is not None and name in self.tap.covered
        }
        with torch.enable_grad():
            weight, bias = ({**leaves, **wanted}[name] for name in leaves)
            outputs = self.tap.function.apply(arrived.hidden, weight, bias, arrived.labels, *self.settings)
        pairs = [(outputs[place], gradient) for place, gradient in arrived.gradients.items()]
        found = torch.autograd.grad([one for one, _ in pairs], list(wanted.values()), [g for _, g in pairs])
        return dict(zip(wanted, found, strict=True))


@dataclass(frozen=True)
class Arrived:
    """What the head was given, and the gradients that came back to its outputs, by their place.

    Attributes:
        hidden: Features, `[N, D]`.
        labels: The tokens whose log-probabilities the head gives, `[N]`.
        gradients: Place of an output -> gradient `[N]`.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    gradients: Mapping[int, torch.Tensor]

    def take(self, positions: Sequence[int]) -> Arrived:
        """Returns the same at some positions."""
        chosen = torch.tensor(positions, device=self.hidden.device)
        gradients = {place: gradient[chosen] for place, gradient in self.gradients.items()}
        return Arrived(self.hidden[chosen], self.labels[chosen], gradients)


class _Identity(torch.autograd.Function):
    """Hands the head's outputs on and, in the backward, their gradients; on their way they are seen."""

    @staticmethod
    def forward(
        ctx: Any,
        again: Again,
        places: Sequence[int],
        hidden_ND: torch.Tensor,
        labels_N: torch.Tensor,
        *outputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(hidden_ND, labels_N)
        ctx.again, ctx.places = again, places
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        pairs = zip(ctx.places, gradients, strict=True)
        found = {place: gradient.detach() for place, gradient in pairs if gradient is not None}
        if found:
            hidden_ND, labels_N = ctx.saved_tensors
            ctx.again.collect(Arrived(hidden_ND, labels_N, found))
        return (None, None, None, None, *gradients)
