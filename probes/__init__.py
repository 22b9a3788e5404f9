"""Exact gradients of every agent slot, measured inside the one ordinary backward of any PyTorch loop.

    scope = probes.attach(model, slots={"generator/0": "generator", "aggregator/0": "aggregator"})
    with scope.rows(slot_of_each_row):
        loss = loss_fn(model(**batch))
    loss.backward()
    record = scope.step(optimizer)  # before clipping and optimizer.step()

What is measured is the gradient of each slot's share of the loss, exactly as it is weighted in that loss. It
is exact if and only if slot k's loss depends on slot k's rows only and no row carries two slots: no attention
from one slot's rows to another's, no normalisation or penalty across rows. The self-check of `step` cannot
see a violation, since the rows still add up; `Scope.verify` can.
"""

from gradscope.errors import ProbeError
from gradscope.probes.attaching import attach
from gradscope.probes.attribution import Attribution
from gradscope.probes.evidence import Evidence
from gradscope.probes.scope import Scope
from gradscope.probes.verify import Verification

__all__ = ["Attribution", "Evidence", "ProbeError", "Scope", "Verification", "attach"]
