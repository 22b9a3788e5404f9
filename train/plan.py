"""What a run would do, worked out with everything loaded but nothing trained: the dry run."""

from __future__ import annotations

from gradscope.train.config import Config
from gradscope.train.session import Session


def describe_plan(config: Config) -> list[str]:
    """Returns what would be trained on what, in lines; loads data, tokenizer and model to be sure of it.

    Raises:
        ConfigError: The model or the data cannot be used.
    """
    session = Session(config)
    session.close()
    rollout, network = config.rollout, session.policies.network
    num_base = sum(p.numel() for name, p in network.named_parameters() if "lora_" not in name)
    num_adapter = sum(p.numel() for p in session.policies.parameters(session.policies.names[0]).values())
    total = session.task.num_problems("train")
    held_out = session.task.num_problems("held_out")
    problem = session.problems(1)[0]
    calls = next(session.workflow.play(problem))
    prompt = session.chat.encode(calls[0].messages)
    return [
        f"workflow: {config.workflow.name}, slots {', '.join(session.workflow.slots)}",
        f"task: {config.task.name}, {_many(total)} training and {_many(held_out)} held-out problems",
        f"model: {config.model.path}, {num_base:,} frozen parameters on {session.updater.device}",
        f"policies: {', '.join(session.policies.names)}, {num_adapter:,} trained parameters each",
        f"probes: {'on' if session.config.probes.enabled else 'off'}",
        f"steps: {config.train.steps}, each {rollout.num_problems} problems x {rollout.group_size} episodes, "
        f"replies of at most {rollout.max_new_tokens} tokens",
        f"first prompt of {calls[0].slot}: {len(prompt)} of at most {rollout.max_prompt_tokens} tokens",
    ]


def _many(num: int | None) -> str:
    return "endless" if num is None else str(num)
