"""What a scope keeps from update to update, for checkpoints, of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.errors import ProbeError
from gradscope.probes.attribution.attributor import Attributor
from gradscope.probes.evidence.gathering import Gathering
from gradscope.probes.reduction import Reduction


def state_of(
    attributor: Attributor, gathering: Gathering, reduction: Reduction, waiting: Sequence[str]
) -> dict[str, Any]:
    """Returns what a later run needs to go on.

    Args:
        attributor: Has momenta.
        gathering: Has schedules.
        reduction: How the work is shared.
        waiting: Policies with rows since their last step.

    Raises:
        ProbeError: There are some.
    """
    if waiting:
        raise ProbeError(
            f"state_dict(): policy {', '.join(waiting)} has rows since its last step, whose gradients a "
            "checkpoint would lose; call it between updates, after step() and optimizer.step()."
        )
    place = {"rank": reduction.rank, "processes": reduction.size}
    return {"attribution": attributor.state(), "evidence": gathering.state(), **place}


def go_on(
    attributor: Attributor, gathering: Gathering, reduction: Reduction, state: Mapping[str, Any]
) -> None:
    """Goes on from what `state_of` returned.

    Raises:
        ProbeError: It is of another process, or of something else than is measured here.
    """
    saved = (state.get("rank", 0), state.get("processes", 1))
    if saved != (reduction.rank, reduction.size):
        raise ProbeError(
            f"load_state_dict(): the state is of rank {saved[0]} of {saved[1]} processes, this is rank "
            f"{reduction.rank} of {reduction.size}. Load each rank's own, into a scope on the model that "
            "is wrapped or sharded already; or none, and momentum counts as carried."
        )
    attributor.load(state.get("attribution", {}))
    gathering.load(state.get("evidence", {}))
