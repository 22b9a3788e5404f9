"""Rollouts: engines that complete prompts, and the driver that plays episodes through them."""

from gradscope.train.rollout.driver import Episode, Row, play_episodes
from gradscope.train.rollout.engine import Completion, Engine, Request
from gradscope.train.rollout.streams import Stream

__all__ = ["Completion", "Engine", "Episode", "Request", "Row", "Stream", "play_episodes"]
