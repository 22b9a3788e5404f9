"""Refuses combinations of settings that cannot train, before any work is done."""

from __future__ import annotations

from gradscope.errors import ConfigError, unknown_name
from gradscope.exporters import EXPORTERS
from gradscope.train.config.plugins import build_workflow
from gradscope.train.config.routing import resolve_routing
from gradscope.train.config.sections import Config


def check_config(config: Config) -> None:
    """Checks what several sections decide together.

    Raises:
        ConfigError: A combination cannot train.
        UnknownNameError: The routing names a role or slot that the workflow lacks, or there is no such
            tracker.
    """
    _check_batch(config)
    for name in config.tracking.to:
        if name not in EXPORTERS and ":" not in name:
            raise unknown_name("tracker", name, EXPORTERS.names(), where="tracking.to")
    workflow = build_workflow(config.workflow)
    resolve_routing(config.policy.routing, workflow.slots)
    if config.optim.schedule == "cosine" and config.optim.warmup_steps >= max(config.train.steps, 1):
        raise ConfigError(
            f"optim.warmup_steps is {config.optim.warmup_steps}, but train.steps is {config.train.steps}: "
            "nothing is left for the cosine. Lower the warm-up."
        )
    if config.evaluate.every and not (config.evaluate.sampled or config.evaluate.greedy):
        raise ConfigError(
            "evaluate.sampled and evaluate.greedy are both off. Switch one on, or set evaluate.every=0."
        )


def _check_batch(config: Config) -> None:
    rollout, minibatches = config.rollout, config.algorithm.num_minibatches
    if rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size is {rollout.group_size}: GRPO compares the episodes of one problem, so a "
            "group needs at least 2. Set rollout.group_size=8."
        )
    if rollout.num_problems % minibatches:
        fitting = [n for n in range(1, rollout.num_problems + 1) if rollout.num_problems % n == 0]
        raise ConfigError(
            f"rollout.num_problems={rollout.num_problems} is not divisible by "
            f"algorithm.num_minibatches={minibatches}. Set the number of minibatches to one of "
            f"{', '.join(map(str, fitting))}, or change the number of problems."
        )
