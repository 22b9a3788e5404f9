"""What the completions of one update amount to, slot by slot, under the names of the run file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reply:
    """One sampled completion.

    Attributes:
        slot: The slot that wrote it.
        num_tokens: Its scored tokens.
        advantage: Its advantage.
        reward: Its reward, NaN where it has none.
        truncated: Whether it was cut at the token limit.
    """

    slot: str
    num_tokens: int
    advantage: float
    reward: float
    truncated: bool


def reply_metrics(replies: Sequence[Reply]) -> dict[str, dict[str, float]]:
    """Returns metric -> slot -> value; a slot without replies is absent."""
    by_slot: dict[str, list[Reply]] = {}
    for reply in replies:
        by_slot.setdefault(reply.slot, []).append(reply)
    metrics: dict[str, dict[str, float]] = {}
    for slot, mine in by_slot.items():
        for name, value in _measures(mine).items():
            metrics.setdefault(name, {})[slot] = value
    return metrics


def mean_reward(replies: Sequence[Reply]) -> float:
    """Returns the mean of the rewards that are known; NaN where none is."""
    rewards = [reply.reward for reply in replies if not math.isnan(reply.reward)]
    return float(np.mean(rewards)) if rewards else math.nan


def _measures(replies: Sequence[Reply]) -> dict[str, float]:
    tokens = [reply.num_tokens for reply in replies]
    rewards = [reply.reward for reply in replies if not math.isnan(reply.reward)]
    magnitude = np.abs([reply.advantage for reply in replies])
    return {
        "reward_mean": mean_reward(replies),
        "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else math.nan,
        "advantage_abs_mean": float(magnitude.mean()),
        "zero_advantage_fraction": float((magnitude == 0).mean()),
        "response_tokens_mean": float(np.mean(tokens)),
        "response_tokens_p95": float(np.percentile(tokens, 95)),
        "truncated_fraction": float(np.mean([reply.truncated for reply in replies])),
        "num_tokens": float(sum(tokens)),
        "num_rows": float(len(replies)),
    }
