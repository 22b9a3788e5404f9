"""What the processes of data-parallel training tell each other before a step, so that all take the same one.

Each says once per step where it stands; all draw the same conclusions from what all said. A process on which
something failed says so here and the others stop with it, instead of waiting for it inside a reduction.

Legend: P covered parameters of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradscope.errors import ProbeError
from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.halves import Halves, find_conflict
from gradscope.probes.reduction import Reduction
from gradscope.probes.rows import RowBatch
from gradscope.probes.strangers import driven_by
from gradscope.probes.targets import Layout, Policy


@dataclass(frozen=True)
class PolicyStanding:
    """What one process has of one policy since its last step.

    Attributes:
        announced: Whether rows were announced.
        tapped: Whether a forward pass that can be differentiated was run with them.
        has_gradient: Whether a covered parameter has a gradient.
        halved: Whether the cells are divided by halves.
        seen: Bits of the covered parameters of which something arrived, `[P]`.
        eps: Rounding step of the coarsest type that went into the sums.
        halves: Half of each problem by its digest; None where problems have no digest.
    """

    announced: bool
    tapped: bool
    has_gradient: bool
    halved: bool
    seen: bytes
    eps: float
    halves: dict[int, int] | None


@dataclass(frozen=True)
class Standing:
    """Where one process stands before a step.

    Attributes:
        failure: Why it cannot measure; None while all is well.
        policies: What it has of each policy that its optimizer drives.
    """

    failure: str | None
    policies: Mapping[str, PolicyStanding]


@dataclass(frozen=True)
class Agreed:
    """What the processes have of one policy together.

    Attributes:
        announced: Whether rows were announced anywhere.
        tapped: Whether a forward pass with them was run anywhere.
        has_gradient: Whether a covered parameter has a gradient anywhere.
        conflict: Why the halves of the processes do not fit together; empty where they do.
    """

    announced: bool
    tapped: bool
    has_gradient: bool
    conflict: str


def driven_policies(optimizer: torch.optim.Optimizer, layout: Layout) -> list[Policy]:
    """Returns the policies of which the optimizer holds covered parameters.

    Raises:
        ProbeError: It holds none.
    """
    driven = driven_by(optimizer, layout)
    if not driven:
        raise ProbeError(
            f"step(): the optimizer holds no parameter of the policies {', '.join(layout.policies)}; pass "
            "the one that was made from the probed model's parameters."
        )
    return driven


def standing_of(
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    collected: Mapping[str, SlotAccumulators],
    batches: Mapping[str, Sequence[RowBatch]],
    halves: Mapping[str, Halves],
    failure: str | None,
) -> Standing:
    """Returns where this process stands.

    Args:
        optimizer: The optimizer that is about to step.
        layout: What is measured.
        collected: The sums of each policy.
        batches: Its micro-batches since its last step.
        halves: Its halves.
        failure: Why collecting stopped; None while all is well.

    Raises:
        ProbeError: The optimizer drives no policy, on the only process there is.
    """
    try:
        driven = driven_policies(optimizer, layout)
    except ProbeError as error:
        if all(sums.reduction.size == 1 for sums in collected.values()):
            raise
        return Standing(failure or str(error), {})
    standings = {
        policy.name: _policy_standing(collected[policy.name], batches[policy.name], halves[policy.name])
        for policy in driven
    }
    return Standing(failure, standings)


def agree(
    standing: Standing, reduction: Reduction, collected: Mapping[str, SlotAccumulators]
) -> dict[str, Agreed]:
    """Returns what all processes have of each policy that the optimizer drives; brings the sums up to it.

    Raises:
        ProbeError: Some process cannot take the step, so none may.
    """
    standings = reduction.gather(standing)
    if failure := _find_failure(standings):
        raise ProbeError(failure)
    return reduction.together(
        lambda: {
            name: _adopt(collected[name], [each.policies[name] for each in standings])
            for name in standing.policies
        }
    )


def _policy_standing(sums: SlotAccumulators, batches: Sequence[RowBatch], halves: Halves) -> PolicyStanding:
    """Returns what this process has of one policy."""
    covered = sums.policy.covered.values()
    return PolicyStanding(
        announced=bool(batches),
        tapped=any(batch.tapped for batch in batches),
        has_gradient=any(parameter.grad is not None for parameter in covered),
        halved=sums.cells.num_halves == 2,
        seen=_bits([id(parameter) in sums.seen for parameter in covered]),
        eps=sums.eps,
        halves=halves.digests(),
    )


def _find_failure(standings: Sequence[Standing]) -> str:
    """Returns why no process may take the step; empty where all may."""
    for rank, standing in enumerate(standings):
        if standing.failure is not None:
            where = f"on rank {rank} of {len(standings)}: " if len(standings) > 1 else ""
            return where + standing.failure
    first = list(standings[0].policies)
    for rank, standing in enumerate(standings):
        if list(standing.policies) != first:
            return (
                f"step(): the optimizer of rank {rank} drives the policies {', '.join(standing.policies)}, "
                f"that of rank 0 {', '.join(first)}; step the same policies on every rank."
            )
    return ""


def _adopt(sums: SlotAccumulators, standings: Sequence[PolicyStanding]) -> Agreed:
    """Brings one policy's sums to what all processes have of it, and returns that."""
    if any(standing.halved for standing in standings):
        sums.halve()
    for number, parameter in enumerate(sums.policy.covered.values()):
        if any(_bit(standing.seen, number) for standing in standings):
            sums.seen.add(id(parameter))
    for standing in standings:
        sums.eps = max(sums.eps, standing.eps)
    return Agreed(
        announced=any(standing.announced for standing in standings),
        tapped=any(standing.tapped for standing in standings),
        has_gradient=any(standing.has_gradient for standing in standings),
        conflict=find_conflict([standing.halves for standing in standings]),
    )


def _bits(flags: Sequence[bool]) -> bytes:
    return np.packbits(np.asarray(flags, dtype=np.uint8)).tobytes()


def _bit(bits: bytes, number: int) -> bool:
    return bool(bits[number // 8] >> (7 - number % 8) & 1)
