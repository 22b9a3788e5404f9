"""What one step of an optimizer came to for one policy, and how that is laid out by role or slot.

Legend: K slots, A parts of the policy, M = A + 2 contributors, L labels (all roles, or all slots).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """What a step came to.

    Attributes:
        products: Inner products of the contributions, `[M, M]`.
        effects: Inner products of the parts' gradients with them, `[A, M]`.
        change_norm: Norm of the applied change.
        gap: Norm of (sum of the contributions - applied change).
        factor: The factor by which the gradient had been scaled since `step`.
        foreign: Relative norm of what else had been done to it.
        drift: Relative norm of what the optimizer's momentum had beyond the parts' before the step.
        dot_previous: Products of the slots' gradients with the change before this one, `[K]`; NaN where it is
            not known.
        dot_mean: Products with the optimizer's running mean of gradients before the step, `[K]`; NaN where it
            has none.
    """

    products: Array
    effects: Array
    change_norm: float
    gap: float
    factor: float
    foreign: float
    drift: float
    dot_previous: Array
    dot_mean: Array

    @property
    def residual(self) -> float:
        """`gap` relative to the change; 0 where both are 0."""
        if self.change_norm == 0:
            return 0.0 if self.gap == 0 else math.inf
        return self.gap / self.change_norm


def by_label(
    result: Result, place_of_part: Sequence[int], present: set[int], num_labels: int
) -> tuple[Array, Array]:
    """Returns products of contributions `[L + 2, L + 2]` and effects `[L, L + 2]` by label.

    Args:
        result: Products by part of one policy.
        place_of_part: Label of each part; parts of one label are added.
        present: Labels with rows in the update; the effects on others are NaN.
        num_labels: L.
    """
    num_parts = len(place_of_part)
    columns = [*place_of_part, num_labels, num_labels + 1]
    known = sorted(set(columns))
    products = np.zeros((num_labels + 2, num_labels + 2))
    np.add.at(products, np.ix_(columns, columns), result.products)
    effects = np.zeros((num_labels, num_labels + 2))
    np.add.at(effects, np.ix_(columns[:num_parts], columns), result.effects)
    update_gram, effect = np.full_like(products, np.nan), np.full_like(effects, np.nan)
    update_gram[np.ix_(known, known)] = products[np.ix_(known, known)]
    rows = sorted(present)
    effect[np.ix_(rows, known)] = effects[np.ix_(rows, known)]
    return update_gram, effect


def among_slots(values: Array, slots: Sequence[int], present: set[int], num_slots: int) -> Array:
    """Returns values of a policy's slots, `[K]`, among all slots; NaN for those without rows."""
    result = np.full(num_slots, np.nan)
    for slot, value in zip(slots, values, strict=True):
        if slot in present:
            result[slot] = value
    return result
