"""OpenRLHF: train/... and train/rollout/..."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect, Trap

KEYS = {
    "actor_grad_norm": "grad_norm",
    "policy_loss": "loss",
    "ppo_kl": "kl_old",
    "kl": "kl_reference",
    "reward": "reward_mean",
    "rollout/reward_mean": "reward_mean",
    "rollout/reward_std": "reward_std",
    "response_length": "response_tokens_mean",
    "rollout/response_length_mean": "response_tokens_mean",
    "rollout/truncated_rate": "truncated_fraction",
    "entropy_loss": "entropy",
    "actor_lr": "learning_rate",
}
"""Key after `train/` to metric; MARTI has the agent between the two."""
TRAPS = (
    Trap("train/.*actor_grad_norm", "OpenRLHF keeps the norm of the last of a step's updates."),
    Trap("eval/.*", "OpenRLHF's evaluations are means without a number of answers; kept under /user."),
)


def dialect() -> Dialect:
    """OpenRLHF: train/actor_grad_norm, train/reward, train/rollout/..."""
    rules = {f"train/{key}": metric for key, metric in KEYS.items()}
    return Dialect(
        rules=rules,
        traps=TRAPS,
        limits=("which role's gradient did what: OpenRLHF trains one actor and logs one norm",),
    )
