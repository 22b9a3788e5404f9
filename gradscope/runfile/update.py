"""One update's measurements, as probes hand them to the run file.

An update is one optimizer step of one policy: the axis of everything about gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradscope.runfile.evidence import ComponentGram, ModuleEvidence, RowEvidence

Array = NDArray[np.float64]


@dataclass
class UpdateRecord:
    """What was measured about one update of one policy.

    K is the number of slots, L of labels, R of roles, C = R + 2 of contributors. A slot without rows in the
    update is NaN in `gram`; it is 0 only if it had rows whose gradient is exactly zero. Fields that were not
    measured are None.

    Attributes:
        policy: Name of the policy that was updated.
        slots: Slot names in the order of every K axis.
        gram: Inner products of the slots' gradients, unclipped, `[K, K]`.
        counts: Per-slot counts, each `[K]`: num_rows, and where the loop said so num_signal_rows, num_tokens,
            advantage_abs_sum, loss_weight. NaN where unknown.
        coverage: Names of trainable parameters that the Gram does not cover; empty when it covers all.
        scalars: Per-update numbers by the names of `/updates`: learning_rate, grad_norm, clip_factor, ...
        gram_cross: Products between halves of the update's problems, `[K, K]`; NaN where no two rows are of
            different halves, None when no problems were given.
        update_gram: Products of the applied contributions, `[C, C]`; contributors are roles, decay, carried.
        effect: First-order effect of a contributor on a role's loss, <g_k, u_l>, `[R, C]`; positive where the
            loss falls, since u = theta_before - theta_after.
        attribution_residual: Relative gap between the sum of contributions and the applied change.
        attribution_reason: Why the change could not be attributed; None where it was, or is not yet.
        slot_update_gram: As `update_gram` by slots, `[K + 2, K + 2]`, where momenta are kept by slot.
        slot_effect: As `effect` by slots, `[K, K + 2]`.
        labels: The second labels of rows, in the order of every L axis; empty when none are declared.
        label_gram: Inner products of the gradients of slots x labels, `[K, L, K, L]`.
        influence: Divergence of a slot's replies under a contribution alone, `[K, C]`, nat a token.
        modules: The update module by module, where that was looked at.
        rows: Its rows one by one, where they were.
        components: Products of the parts of its loss, where these were measured apart.
        pending: Whether it waits for `optimizer.step()`, which fills in what was applied.
    """

    policy: str
    slots: tuple[str, ...]
    gram: Array
    counts: dict[str, Array] = field(default_factory=dict)
    coverage: tuple[str, ...] = ()
    scalars: dict[str, float] = field(default_factory=dict)
    gram_cross: Array | None = None
    update_gram: Array | None = None
    effect: Array | None = None
    attribution_residual: float | None = None
    attribution_reason: str | None = None
    slot_update_gram: Array | None = None
    slot_effect: Array | None = None
    labels: tuple[str, ...] = ()
    label_gram: Array | None = None
    influence: Array | None = None
    modules: ModuleEvidence | None = None
    rows: RowEvidence | None = None
    components: ComponentGram | None = None
    pending: bool = False


def minibatches(records: Sequence[UpdateRecord]) -> list[int]:
    """Returns each record's running number among those of its policy, of the records of one step."""
    seen: Counter[str] = Counter()
    numbers = []
    for record in records:
        numbers.append(seen[record.policy])
        seen[record.policy] += 1
    return numbers


def update_paths(records: Sequence[UpdateRecord]) -> list[str]:
    """Returns `updates/POLICY` of each record of a step, `updates/POLICY/MINIBATCH` where it had several."""
    num = Counter(record.policy for record in records)
    return [
        f"updates/{record.policy}/{place}" if num[record.policy] > 1 else f"updates/{record.policy}"
        for record, place in zip(records, minibatches(records), strict=True)
    ]
