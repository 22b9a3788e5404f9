"""MARTI: OpenRLHF's keys with the agent in the middle."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect
from gradscope.importers.dialects import openrlhf


def dialect() -> Dialect:
    """MARTI: train/AGENT/actor_grad_norm, train/AGENT/reward, ..."""
    rules = {f"train/(?P<role>(?!rollout/)[^/]+)/{key}": metric for key, metric in openrlhf.KEYS.items()}
    return Dialect(rules=rules, traps=openrlhf.TRAPS)
