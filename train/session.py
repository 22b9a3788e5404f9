"""Everything a run computes with, built once from a configuration: no files are written here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gradscope.train.batch import Sample
from gradscope.train.config.plugins import build_task, build_workflow
from gradscope.train.config.routing import resolve_routing
from gradscope.train.config.sections import Config
from gradscope.train.episode import Problem, Task, Workflow
from gradscope.train.metrics import mean, slot_metrics
from gradscope.train.model import check_lengths, load_chat, load_model
from gradscope.train.policy import Policies
from gradscope.train.preflight import check_learning, check_prompts, check_texts
from gradscope.train.probing import Probe
from gradscope.train.problem_order import training_indices
from gradscope.train.rewards import make_samples, takes_part
from gradscope.train.rollout import Episode, Stream, play_episodes
from gradscope.train.rollout.chat import Chat
from gradscope.train.rollout.hf import HFEngine
from gradscope.train.schedule import learning_rate
from gradscope.train.update import Updater, UpdateReport


@dataclass(frozen=True)
class StepResult:
    """What one training step computed.

    Attributes:
        step: Number of the step, from 1.
        episodes: Its episodes.
        samples: Their replies with rewards and advantages.
        updates: Its updates, in order.
        metrics: Numbers by the names of the run file's `/train`.
        events: Kind and message of what happened.
    """

    step: int
    episodes: list[Episode]
    samples: list[Sample]
    updates: list[UpdateReport]
    metrics: dict[str, object]
    events: list[tuple[str, str]] = field(default_factory=list)


class Session:
    """A workflow, a task and policies on a model, ready to train.

    Args:
        config: A checked configuration.

    Raises:
        ConfigError: The model, its tokenizer or the data cannot be used.
        DataError: The task's data cannot be read.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task: Task = build_task(config.task)
        self.workflow: Workflow = build_workflow(config.workflow)
        self.routing = resolve_routing(config.policy.routing, self.workflow.slots)
        check_texts(self.task, self.workflow, config)
        check_lengths(config.model, config.rollout)
        check_prompts(self.task, self.workflow, load_chat(config.model), config)
        # PEFT and transformers draw numbers for what is then overwritten; the caller's stay as they are.
        with torch.random.fork_rng(devices=[]):
            model = load_model(config.model)
            self.policies = Policies(
                model, self.routing, section=config.policy, optim=config.optim, seed=config.train.seed
            )
        for adapter in self.policies.peft.peft_config.values():
            adapter.base_model_name_or_path = config.model.path  # as configured, not where it lies here
        self.chat: Chat = load_chat(config.model, model)
        self.engine = HFEngine(
            self.policies.network,
            self.policies.activate,
            end_ids=self.chat.end_ids,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            max_batch_rows=config.rollout.max_batch_rows,
        )
        self.probe = Probe(self.policies.network, self.workflow.slots, self.routing, section=config.probes)
        self.updater = Updater(self.policies, config, roles=self.workflow.slots, probe=self.probe)

    def problems(self, step: int) -> list[Problem]:
        """Returns the training problems of a step."""
        train = self.config.train
        indices = training_indices(
            train.seed, step, self.config.rollout.num_problems, total=self.task.num_problems("train")
        )
        return [self.task.problem("train", index) for index in indices]

    def play(
        self, problems: Sequence[Problem], *, group_size: int, stream: Stream, greedy: bool = False
    ) -> list[Episode]:
        """Plays episodes with the policies as they are."""
        return play_episodes(
            self.workflow,
            self.task,
            problems,
            group_size=group_size,
            engine=self.engine,
            chat=self.chat,
            routing=self.routing,
            stream=stream,
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            greedy=greedy,
        )

    def train_step(self, step: int) -> StepResult:
        """Samples episodes, rewards them and updates every policy; `step` counts from 1."""
        begin = time.perf_counter()
        stream = Stream(self.config.train.seed, "train", step)
        episodes = self.play(self.problems(step), group_size=self.config.rollout.group_size, stream=stream)
        rolled_out = time.perf_counter()
        self.probe.take_seconds()
        samples = make_samples(episodes, self.config.algorithm)
        if step == 1:
            check_learning(episodes, samples)
        updates = self._update(step, [sample for sample in samples if takes_part(sample)])
        probing = self.probe.take_seconds()
        seconds = {
            "rollout": rolled_out - begin,
            "update": time.perf_counter() - rolled_out - probing,
            "probes": probing,
        }
        metrics = self._metrics(step, episodes, samples, updates)
        events = [*self.probe.take_events(), *_events(episodes, updates)]
        return StepResult(step, episodes, samples, updates, {**metrics, "seconds": seconds}, events)

    def close(self) -> None:
        """Takes the probes off the model."""
        self.probe.close()

    def _update(self, step: int, samples: Sequence[Sample]) -> list[UpdateReport]:
        optim, algorithm = self.config.optim, self.config.algorithm
        rate = learning_rate(
            step,
            peak=optim.learning_rate,
            num_steps=self.config.train.steps,
            warmup_steps=optim.warmup_steps,
            schedule=optim.schedule,
        )
        per_minibatch = self.config.rollout.num_problems // algorithm.num_minibatches
        updates = []
        for minibatch in range(algorithm.num_minibatches):
            rows = [sample for sample in samples if sample.problem // per_minibatch == minibatch]
            for policy in self.policies.names:
                mine = [sample for sample in rows if self.routing[sample.row.slot] == policy]
                if mine:
                    updates.append(self.updater.update(policy, mine, minibatch=minibatch, learning_rate=rate))
        return updates

    def _metrics(
        self,
        step: int,
        episodes: Sequence[Episode],
        samples: Sequence[Sample],
        updates: Sequence[UpdateReport],
    ) -> dict[str, object]:
        finished = [float(episode.correct) for episode in episodes if episode.dropped is None]
        total = self.task.num_problems("train")
        metrics: dict[str, object] = {
            "loss": mean(update.loss for update in updates),
            "episode_reward_mean": mean(finished),
            **slot_metrics(samples, self.workflow.slots),
            **trainer_metrics(samples, updates),
        }
        if total is not None:
            metrics["epoch"] = step * self.config.rollout.num_problems / total
        return metrics


def trainer_metrics(
    samples: Sequence[Sample], updates: Sequence[UpdateReport]
) -> dict[str, dict[str, float]]:
    """Returns, by slot, how far the sampler is from the trainer and how much was clipped.

    `kl_rollout` is of rows trained before any other update of their policy in the step, so that sampler and
    trainer hold the same weights; `kl_old` is of the later ones. Both look at rows with an advantage only.
    """
    slot_of = {sample.row.id: sample.row.slot for sample in samples}
    sums: dict[str, dict[str, list[float]]] = {}
    for update in updates:
        lag = update.record.scalars["minibatch"]
        for row_id, tokens in update.tokens.items():
            slot = slot_of[row_id]
            divergence = "kl_old" if lag else "kl_rollout"
            for name, value in (
                (divergence, tokens.divergence),
                ("clip_fraction", tokens.num_clipped),
                ("policy_lag", lag * tokens.num_tokens),
            ):
                total = sums.setdefault(name, {}).setdefault(slot, [0.0, 0.0])
                total[0] += value
                total[1] += tokens.num_tokens
    return {
        name: {slot: value / count for slot, (value, count) in by_slot.items()}
        for name, by_slot in sums.items()
    }


def _events(episodes: Sequence[Episode], updates: Sequence[UpdateReport]) -> list[tuple[str, str]]:
    events = [
        (
            "nonfinite_update",
            f"policy '{update.record.policy}': gradient norm {update.record.scalars['grad_norm']}; "
            "the optimizer step was left out",
        )
        for update in updates
        if update.nonfinite
    ]
    dropped = [episode.dropped for episode in episodes if episode.dropped is not None]
    if dropped:
        events.append(
            ("dropped_episodes", f"{len(dropped)} of {len(episodes)} episodes; first: {dropped[0]}")
        )
    return events
