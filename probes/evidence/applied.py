"""What an optimizer step changed, contributor by contributor, kept for as long as evidence needs it.

Legend: M contributors, A parts of the policy, P numbers of its covered parameters that this process accounts
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.probes.attribution.ledger import Ledger
from gradscope.probes.reduction import Reduction
from gradscope.schema import EXTRA_CONTRIBUTORS


@dataclass(frozen=True)
class Applied:
    """The contributions to one step of one policy; the parameters before it less all of them are those after.

    Attributes:
        contributors: Names along M.
        parameters: Covered parameters by name.
        before: Parameters before the step, by name, flat.
        changes: Contributions, by name of the parameter, each `[M, n]`.
        reduction: What this process accounts for.
    """

    contributors: tuple[str, ...]
    parameters: dict[str, nn.Parameter]
    before: dict[str, torch.Tensor]
    changes: dict[str, torch.Tensor]
    reduction: Reduction

    @contextmanager
    def placed(self) -> Iterator[Placing]:
        """Lets a block move the parameters; they are put back bit by bit when it ends."""
        local = {name: self.reduction.local(p) for name, p in self.parameters.items()}
        kept = {name: tensor.clone() for name, tensor in local.items()}
        try:
            yield Placing(self, local)
        finally:
            for name, tensor in local.items():
                tensor.copy_(kept[name])


@dataclass(frozen=True)
class Placing:
    """Moves parameters about a step; `local` are their numbers, written to in place."""

    applied: Applied
    local: dict[str, torch.Tensor]

    def before(self) -> None:
        """Puts the parameters where they were before the step."""
        for name, tensor in self.local.items():
            tensor.copy_(self.applied.before[name])

    def after(self, contributor: int) -> None:
        """Puts them where the change of one contributor alone would have moved them."""
        for name, tensor in self.local.items():
            tensor.copy_(self.applied.before[name] - self.applied.changes[name][contributor])


class Keeper:
    """Buffers for the contributions of one step, filled in while it is settled.

    Args:
        ledger: Of the policy.
        labels: Label (role) of each part, `[A]`; parts of one label are one contributor.
        reduction: What this process accounts for.

    Attributes:
        buffers: One for each block of the ledger, `[A + 2, P]`.
    """

    def __init__(self, ledger: Ledger, labels: Sequence[str], reduction: Reduction) -> None:
        self._ledger = ledger
        self._labels = (*labels, *EXTRA_CONTRIBUTORS)
        self._reduction = reduction
        self.buffers = [
            columns.before.new_zeros(len(self._labels), len(columns.before)) for columns in ledger.columns
        ]

    def applied(self) -> Applied:
        """Returns what was kept."""
        contributors = tuple(dict.fromkeys(self._labels))
        places = torch.tensor([contributors.index(label) for label in self._labels])
        before, changes = {}, {}
        for columns, buffer in zip(self._ledger.columns, self.buffers, strict=True):
            summed = buffer
            if len(contributors) < len(self._labels):
                summed = buffer.new_zeros(len(contributors), buffer.shape[1])
                summed.index_add_(0, places.to(buffer.device), buffer)
            for name, place in columns.slices().items():
                before[name], changes[name] = columns.before[place], summed[:, place]
        return Applied(contributors, dict(self._ledger.policy.covered), before, changes, self._reduction)
