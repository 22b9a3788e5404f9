"""Refuses, before anything is written or at the first step, a run that cannot learn anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradscope.errors import ConfigError
from gradscope.train.batch import Sample
from gradscope.train.config.sections import Config
from gradscope.train.episode import Problem, Task, Workflow
from gradscope.train.rewards import takes_part
from gradscope.train.rollout import Episode
from gradscope.train.rollout.chat import Chat

SPLITS = ("train", "held_out")
NUM_TRIED = 8


def check_texts(task: Task, workflow: Workflow, config: Config) -> None:
    """Checks that the task has texts for the workflow's style, on one problem of each split.

    Raises:
        ConfigError: It has none.
    """
    style = config.workflow.style
    for split in SPLITS:
        for problem in _first_problems(task, split, num=1):
            if not problem.text(style):
                raise ConfigError(
                    f"task '{config.task.name}' has no {style} text, which workflow.style={style} asks for. "
                    "Set workflow.style=natural and a model that reads sentences, or name a scale: "
                    f"{config.workflow.name}-shared-{config.task.name}-135M."
                )


def check_prompts(task: Task, workflow: Workflow, chat: Chat, config: Config) -> None:
    """Checks that the first prompt of one of a few problems of each split is short enough.

    Raises:
        ConfigError: All are too long, or empty because the tokenizer is not whole.
    """
    allowed = config.rollout.max_prompt_tokens
    for split in SPLITS:
        lengths = [
            max((len(chat.encode(call.messages)) for call in next(workflow.play(problem), ())), default=0)
            for problem in _first_problems(task, split, num=NUM_TRIED)
        ]
        if lengths and min(lengths) == 0:
            raise ConfigError(
                f"model.path: '{config.model.path}' has a tokenizer that makes nothing of a prompt. "
                "Put its tokenizer files (tokenizer.json) into the folder, or take another model."
            )
        if lengths and min(lengths) > allowed:
            raise ConfigError(
                f"rollout.max_prompt_tokens is {allowed}, but the first prompts of split '{split}' have "
                f"{min(lengths)} to {max(lengths)} tokens. "
                f"Set rollout.max_prompt_tokens={max(lengths)} or more."
            )


def _first_problems(task: Task, split: str, *, num: int) -> Iterator[Problem]:
    total = task.num_problems(split)
    return (task.problem(split, index) for index in range(num if total is None else min(num, total)))


def check_learning(episodes: Sequence[Episode], samples: Sequence[Sample]) -> None:
    """Checks that a step has something to learn from.

    Raises:
        ConfigError: Every episode was dropped, or no reply has a reward.
    """
    if all(episode.dropped is not None for episode in episodes):
        raise ConfigError(
            f"every episode of the first step was dropped; first: {episodes[0].dropped}. "
            "Raise rollout.max_prompt_tokens, and add --resume where the run has begun."
        )
    if not any(map(takes_part, samples)):
        raise ConfigError(
            "no reply of the first step has a reward, so nothing can be learnt. "
            "Set algorithm.reward=outcome, and start in another folder."
        )
