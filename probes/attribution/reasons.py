"""Why a step of an optimizer cannot be attributed."""

from __future__ import annotations

import math

import torch

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.attribution.ledger import Ledger
from gradscope.probes.attribution.result import Result


def reason_against(sums: SlotAccumulators, ledger: Ledger, result: Result, *, with_closure: bool) -> str:
    """Returns why a step cannot be attributed; empty where it can.

    Args:
        sums: The sums of its policy.
        ledger: The momenta, and the parameters as they were before the step.
        result: What the step came to.
        with_closure: Whether the step computed the gradient anew.
    """
    if with_closure:
        return "the optimizer was stepped with a closure, which computes the gradient anew"
    if sums.left_out:
        return "the slots of some parameters could not be told apart in this update"
    if math.isnan(result.foreign) or math.isnan(result.change_norm):
        return "the gradient or the change is not finite"
    if result.foreign:
        return (
            f"between step() and optimizer.step() the gradient was altered by more than a factor: "
            f"{result.foreign:.2g} of its norm is not the slots'"
        )
    precision = max(math.sqrt(sums.eps), ledger.rounding)
    if result.gap <= precision * result.change_norm:
        return ""
    stored = _stored_precision(sums, ledger)
    if result.gap <= precision * result.change_norm + min(stored, result.change_norm):
        return ""
    return (
        f"the contributions miss the change by {result.residual:.2g} of its norm: gradients that cancel to "
        "rounding, or changes that are rounded away where the weights are stored"
    )


def _stored_precision(sums: SlotAccumulators, ledger: Ledger) -> float:
    """Returns the norm of what is lost at most where parameters are stored: half a rounding step of each."""
    square = torch.zeros((), dtype=torch.float64)
    for columns in ledger.columns:
        step = max(torch.finfo(parameter.dtype).eps for parameter in columns.parameters) / 2
        square += step**2 * columns.before.double().square().sum().cpu()
    return math.sqrt(float(sums.reduction.add_up(square)))
