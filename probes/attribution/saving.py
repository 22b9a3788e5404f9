"""A ledger as tensors, numbers and names, for checkpoints.

Legend: A parts, n numbers of one parameter that this process accounts for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.errors import ProbeError
from gradscope.probes.attribution.ledger import Ledger


def save_ledger(ledger: Ledger, parts: Sequence[str]) -> dict[str, Any]:
    """Returns what is kept: numbers, and by parameter momenta `[A, n]` and more `[n]`."""
    parameters = {
        name: {
            key: tensor[..., place].clone()
            for key, tensor in {"before": c.before, "momenta": c.momenta, **c.extra}.items()
            if tensor is not None
        }
        for c in ledger.columns
        for name, place in c.slices().items()
    }
    return {
        "parts": list(parts),
        "previous_square": ledger.previous_square,
        "carried_weight": ledger.carried_weight,
        "parameters": parameters,
    }


def load_ledger(ledger: Ledger, state: Mapping[str, Any], parts: Sequence[str]) -> Ledger:
    """Returns a fresh ledger with what `save_ledger` returned put into it.

    Raises:
        ProbeError: It is of other parts, parameters or shapes.
    """
    name = ledger.policy.name
    if list(state["parts"]) != list(parts):
        raise ProbeError(
            f"load_state_dict(): policy '{name}' has the parts {', '.join(parts)}, the state has "
            f"{', '.join(state['parts'])}. Attach with the slots and settings it was saved with."
        )
    held = {parameter for columns in ledger.columns for parameter in columns.names}
    if unknown := [parameter for parameter in state["parameters"] if parameter not in held]:
        raise ProbeError(
            f"load_state_dict(): policy '{name}' has no covered parameter '{unknown[0]}', of which the state "
            f"has momenta ({len(unknown)} such); load the state of the same parameters."
        )
    ledger.previous_square = float(state["previous_square"])
    ledger.carried_weight = float(state["carried_weight"])
    try:
        for columns in ledger.columns:
            for parameter, place in columns.slices().items():
                for key, tensor in state["parameters"][parameter].items():
                    ledger.buffer(columns, key)[..., place] = tensor.to(columns.before.device)
    except (KeyError, RuntimeError) as error:
        raise ProbeError(
            f"load_state_dict(): policy '{name}' does not fit the model ({error}); load the state of the "
            "same parameters, saved by as many processes."
        ) from error
    return ledger
