"""Dr.MAS: verl's keys with the worker group of an agent in the middle."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect, Trap
from gradscope.importers.dialects import verl

ROLE = "(?P<role>[^/]+)"
RULES = {
    **{f"actor/{ROLE}/{key}": metric for key, metric in verl.ACTOR.items()},
    f"critic/{ROLE}/score/mean": "reward_mean",
    f"critic/{ROLE}/rewards/mean": "reward_mean",
    f"response_length/{ROLE}/mean": "response_tokens_mean",
    f"response_length/{ROLE}/clip_ratio": "truncated_fraction",
    **{key: metric for key, metric in verl.RULES.items() if not key.startswith("actor/")},
}
LIMITS = (
    "how rewards scatter, so neither the inflation of another role's advantages: Dr.MAS logs means, largest "
    "and smallest, no deviation",
    "the parts of agents that share a model: they share one worker group, whose norm is of their sum",
)


def dialect() -> Dialect:
    """Dr.MAS: actor/AGENT/grad_norm, critic/AGENT/score/mean, ..."""
    mean = Trap("actor/.*/grad_norm", "Dr.MAS's grad_norm is the mean over a step's mini-batches.")
    return Dialect(rules=RULES, traps=(mean, *verl.TRAPS[1:]), limits=LIMITS)
