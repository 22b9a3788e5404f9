"""TRL's GRPO trainer, in its own state and, with `train/` before the keys, in trackers."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect, Trap

RULES = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "loss": "loss",
    "policy_loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "epoch": "epoch",
    "kl": "kl_reference",
    "entropy": "entropy",
    "completions/mean_length": "response_tokens_mean",
    "completion_length": "response_tokens_mean",
    "completions/clipped_ratio": "truncated_fraction",
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio": "clip_fraction",
    "(?P<phase>step)_time": "seconds",
}
TRAPS = (
    Trap(
        "(train/)?reward_std",
        "TRL's reward_std is the deviation over the whole batch in newer versions, and was the mean of the "
        "groups' deviations before: the log does not say which.",
    ),
    Trap(
        "(train/)?num_tokens", "TRL's num_tokens counts all tokens since the start; it is kept under /user."
    ),
    Trap(
        "(train/)?frac_reward_zero_std",
        "TRL's frac_reward_zero_std is a fraction of groups, not of replies; it is kept under /user.",
    ),
    Trap(
        "(eval_|eval/).*",
        "TRL's evaluations are means without a number of answers; they are kept under /user.",
    ),
)
LIMITS = (
    "which role's gradient did what: TRL trains one policy and logs one norm, so all is one role 'policy'",
)


def dialect() -> Dialect:
    """TRL and Hugging Face Trainer: reward, grad_norm, completions/..., bare or after train/."""
    rules = {f"(?:train/)?{pattern}": metric for pattern, metric in RULES.items()}
    return Dialect(rules=rules, traps=TRAPS, limits=LIMITS, window="last")
