"""PettingLLMs: verl's keys after the name of a model, rewards by agent."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect
from gradscope.importers.dialects import verl

MODEL, AGENT = "(?P<policy>[^/]+)", "(?P<role>[^/]+)"
RULES = {
    f"{MODEL}/reward_by_agent/{AGENT}/mean": "reward_mean",
    f"{MODEL}/reward_by_agent/{AGENT}/std": "reward_std",
    **{f"{MODEL}/actor/{key}": metric for key, metric in verl.ACTOR.items()},
}


def dialect() -> Dialect:
    """PettingLLMs: MODEL/actor/grad_norm, MODEL/reward_by_agent/AGENT/{mean,std}."""
    return Dialect(
        rules=RULES,
        traps=verl.TRAPS[:1],
        limits=("the parts of agents that share a model: the log has one norm for each model",),
    )
