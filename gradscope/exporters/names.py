"""What scalars are called outside: `train/...`, `updates/...`, `grad/...`, `eval/...`, role or slot in it.

- `train/NAME`, `train/SLOT/NAME`, `train/seconds/PHASE`: as in /train of the run file.
- `updates/POLICY/NAME`, `updates/POLICY/MINIBATCH/NAME`: numbers of /updates; those by slot end in /SLOT.
- `updates/POLICY/gram/SLOT|SLOT`: inner products, in tables only.
- `grad/ROLE/POLICY/norm`, `.../energy_share`, `.../coherence`: from the products, for trackers.
- `eval/DATASET/greedy|sampled|unstated/NAME`, `.../ROLE/NAME`: as in /eval, and accuracy.
- `user/NAME`, `user/LABEL/NAME`: what the schema does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradscope import derive
from gradscope.runfile.columns import number
from gradscope.runfile.update import UpdateRecord, update_paths
from gradscope.schema import TABLES

PRODUCTS = ("gram", "gram_cross")


def train_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns a step's metrics by name, as given to `RunWriter.append`; missing ones are left out."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        variable = TABLES["train"].variable(name)
        group = "user" if variable is None else "train"
        if isinstance(value, Mapping):
            by_phase = variable is not None and "phase" in variable.dims
            for label, own in value.items():
                _put(values, f"{group}/{name}/{label}" if by_phase else f"{group}/{label}/{name}", own)
        else:
            _put(values, f"{group}/{name}", value)
    return values


def update_values(records: Sequence[UpdateRecord], *, products: bool) -> dict[str, float]:
    """Returns the numbers of a step's updates by name, with their inner products where asked for."""
    values: dict[str, float] = {}
    for place, record in zip(update_paths(records), records, strict=True):
        for name, value in record.scalars.items():
            _put(values, f"{place}/{name}", value)
        for name, counts in record.counts.items():
            for slot, value in zip(record.slots, counts, strict=True):
                _put(values, f"{place}/{name}/{slot}", value)
        for name in PRODUCTS if products else ():
            for (slot, other), value in _pairs(record, name):
                _put(values, f"{place}/{name}/{slot}|{other}", value)
    return values


def gradient_values(records: Sequence[UpdateRecord], roles: Mapping[str, str]) -> dict[str, float]:
    """Returns norms, energy shares and coherences of the roles' gradients on each policy, by name.

    Several updates of a policy are summed first: a sum of squares, not the square of the sum.

    Args:
        records: The step's updates.
        roles: Slot to role.
    """
    values: dict[str, float] = {}
    for policy in dict.fromkeys(record.policy for record in records):
        own = [record for record in records if record.policy == policy]
        if len({record.slots for record in own}) > 1:
            continue  # a slot that turned up within the step; the next one has them all
        gram = derive.summed(np.stack([record.gram for record in own]), np.array([0]))[0]
        names = [roles.get(slot, slot.split("/")[0]) for slot in own[0].slots]
        there = list(dict.fromkeys(names))
        of_roles = derive.role_gram(gram, derive.membership(names, there))
        shares = derive.diagonal_share(of_roles)
        present = int(np.isfinite(shares).sum())
        for place, role in enumerate(there):
            members = [slot for slot, name in enumerate(names) if name == role]
            _put(values, f"grad/{role}/{policy}/norm", derive.norms(of_roles)[place])
            if present > 1:
                _put(values, f"grad/{role}/{policy}/energy_share", shares[place])
            if len(members) > 1:
                within = derive.coherence(gram[np.ix_(members, members)])
                _put(values, f"grad/{role}/{policy}/coherence", within)
    return values


def evaluation_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of one evaluation by name.

    Args:
        row: dataset, greedy, num_correct, num_total, temperature, and by role role_accuracy and
            role_tokens_mean.
    """
    sampling = {1: "greedy", 0: "sampled"}.get(row.get("greedy", -1), "unstated")
    place = f"eval/{row['dataset']}/{sampling}"
    values: dict[str, float] = {}
    for name in ("num_correct", "num_total", "temperature"):
        _put(values, f"{place}/{name}", row.get(name))
    correct, total = values.get(f"{place}/num_correct"), values.get(f"{place}/num_total")
    if correct is not None and total:
        values[f"{place}/accuracy"] = correct / total
    for name in ("role_accuracy", "role_tokens_mean"):
        for role, value in (row.get(name) or {}).items():
            _put(values, f"{place}/{role}/{name}", value)
    return values


def _put(values: dict[str, float], name: str, value: Any) -> None:
    """Adds a number unless it is missing."""
    found = number(value)
    if found is not None and not math.isnan(found):
        values[name] = found


def _pairs(record: UpdateRecord, name: str) -> Iterator[tuple[tuple[str, str], float]]:
    """Yields the upper half of a matrix of products."""
    matrix = getattr(record, name)
    if matrix is None:
        return
    for row, slot in enumerate(record.slots):
        for column in range(row, len(record.slots)):
            yield (slot, record.slots[column]), float(matrix[row, column])
