"""Which training problems a step plays, as a function of seed and step alone."""

from __future__ import annotations

import numpy as np

ENDLESS = 2**40
"""Generated tasks number their problems without end; indices are drawn from this many."""


def training_indices(seed: int, step: int, num: int, *, total: int | None) -> list[int]:
    """Returns the `num` problem indices of training step `step` (the first is 1).

    A task with `total` problems is gone through in a new random order each epoch; one without end is sampled.
    """
    if total is None:
        drawn = np.random.default_rng([seed, step]).integers(ENDLESS, size=num)
        return [int(index) for index in drawn]
    first = (step - 1) * num
    places = range(first, first + num)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(total)
        for epoch in {place // total for place in places}
    }
    return [int(orders[place // total][place % total]) for place in places]
