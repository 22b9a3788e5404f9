"""rLLM: reward/ROLE/... and advantage/ROLE/..., with tinker's or verl's keys for the one policy."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect
from gradscope.importers.dialects import verl

ROLE = "(?P<role>[^/]+)"
RULES = {
    f"reward/{ROLE}/mean": "reward_mean",
    f"reward/{ROLE}/std": "reward_std",
    f"advantage/{ROLE}/fraction_zero": "zero_advantage_fraction",
    "batch/success": "episode_reward_mean",
    "train/entropy": "entropy",
    "train/kl_sample_train_v1": "kl_rollout",
    **verl.RULES,
}


def dialect() -> Dialect:
    """rLLM: reward/ROLE/mean, reward/ROLE/std, advantage/ROLE/fraction_zero, ..."""
    return Dialect(
        rules=RULES,
        traps=verl.TRAPS[:2],
        limits=("which role's gradient did what: rLLM logs one norm for all roles, or none",),
    )
