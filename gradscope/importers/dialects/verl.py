"""verl: actor/..., critic/..., response_length/..., timing_s/..., one actor for all."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect, Trap

ACTOR = {
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "entropy": "entropy",
    "entropy_loss": "entropy",
    "ppo_kl": "kl_old",
    "kl_loss": "kl_reference",
    "pg_clipfrac": "clip_fraction",
}
"""Key after `actor/` to metric; forks with several agents have the agent between the two."""
RULES = {
    **{f"actor/{key}": metric for key, metric in ACTOR.items()},
    "actor/loss": "loss",
    "actor/pg_loss": "loss",
    "critic/score/mean": "reward_mean",
    "critic/rewards/mean": "reward_mean",
    "response_length/mean": "response_tokens_mean",
    "response_length/clip_ratio": "truncated_fraction",
    r"timing_s/(?P<phase>.+)": "seconds",
    "training/epoch": "epoch",
    r"val-core/(?P<dataset>.+)/acc/mean@(?P<repeats>\d+)": "eval_accuracy",
}
TRAPS = (
    Trap(
        "actor/.*grad_norm",
        "verl's actor/grad_norm is the mean over a step's mini-batches (by version the last one's).",
    ),
    Trap(
        "critic/.*/mean",
        "critic/score and critic/rewards are rewards, there even without a critic; score is before the KL "
        "penalty and is the one taken where both are logged.",
    ),
    Trap(
        "variance_proxy/.*", "variance_proxy/* are verl's own estimates of gradient noise; kept under /user."
    ),
)
LIMITS = ("how rewards scatter: verl logs their mean, largest and smallest, no deviation",)


def dialect() -> Dialect:
    """verl: actor/grad_norm, critic/score/mean, response_length/mean, val-core/..."""
    shared = ("which role's gradient did what: verl trains one actor and logs one norm",)
    return Dialect(rules=RULES, traps=TRAPS, limits=(*shared, *LIMITS))
