"""What an engine is asked and what it answers: the seam behind which other samplers fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Request:
    """One prompt to complete once.

    Attributes:
        prompt_ids: Token ids of the whole prompt.
        policy: Name of the policy that completes it.
        uniforms: One number in [0, 1) for each token that may be sampled, `[max_new_tokens]`. They alone
            decide the sample, so it does not depend on what is sampled beside it.
    """

    prompt_ids: tuple[int, ...]
    policy: str
    uniforms: NDArray[np.float64]


@dataclass(frozen=True)
class Completion:
    """One sampled reply.

    Attributes:
        ids: Sampled token ids, the end token included where one was sampled.
        logprobs: Log-probability of each sampled token at the sampling temperature, `[T]`.
        entropy: Entropy of the sampling distribution at each token, nats, `[T]`.
        truncated: Whether the reply was cut before an end token.
    """

    ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    truncated: bool


class Engine(Protocol):
    """Completes prompts with named policies."""

    max_new_tokens: int

    def generate(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Completion]:
        """Returns one completion a request, in order; `greedy` takes the most probable tokens instead."""
        ...
