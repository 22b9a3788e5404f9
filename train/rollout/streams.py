"""Independent random streams, one for each reply, that depend on nothing but the reply's place in the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DOMAINS = ("train", "evaluate")
MAX_TURNS = 2**20


@dataclass(frozen=True)
class Stream:
    """The source of all random numbers of one step.

    Attributes:
        seed: Seed of the run.
        domain: What the numbers are for; training and evaluation never share any.
        step: Training step.
    """

    seed: int
    domain: Literal["train", "evaluate"]
    step: int

    def uniforms(self, num: int, *, problem: int, sample: int, slot: int, turn: int) -> NDArray[np.float64]:
        """Returns `[num]` numbers in [0, 1) for one reply.

        Philox is counter-based (Salmon et al., SC 2011): the step makes its key and the place of the reply
        three of the four words of its counter, so no two replies overlap and none waits for another.
        """
        counter = [0, problem, sample, slot * MAX_TURNS + turn]
        return np.random.Generator(np.random.Philox(key=self._key, counter=counter)).random(num)

    @cached_property
    def _key(self) -> NDArray[np.uint64]:
        words = [self.seed, DOMAINS.index(self.domain), self.step]
        return np.random.SeedSequence(words).generate_state(2, np.uint64).astype(np.uint64)
