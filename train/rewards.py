"""From episodes to training samples: the reward of every reply and its advantage over its group."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradscope.train.batch import Sample
from gradscope.train.config.sections import AlgorithmSection
from gradscope.train.grpo import group_advantages
from gradscope.train.rollout.driver import Episode, Row


def make_samples(episodes: Sequence[Episode], section: AlgorithmSection) -> list[Sample]:
    """Returns one sample a reply of the finished episodes, ordered by problem, episode and call."""
    rows = [(episode, row) for episode in episodes for row in episode.rows]
    groups = [(episode.problem_index, *_group(row, section.group_by)) for episode, row in rows]
    rewards = [float(episode.correct) if section.reward == "outcome" else row.own for episode, row in rows]
    advantages = group_advantages(
        rewards,
        groups,
        baseline=section.baseline,
        scale=section.scale,
        ddof=section.ddof,
        eps=section.eps,
        singleton=section.singleton,
    )
    return [
        Sample(row, episode.problem_index, group, reward, float(advantage))
        for (episode, row), group, reward, advantage in zip(rows, groups, rewards, advantages, strict=True)
    ]


def takes_part(sample: Sample) -> bool:
    """Returns whether a sample has a reward, so that it counts in the loss."""
    return not math.isnan(sample.advantage)


def _group(row: Row, group_by: str) -> tuple[object, ...]:
    if group_by == "slot":
        return (row.slot,)
    return (row.role,) if group_by == "role" else (row.role, row.turn)
