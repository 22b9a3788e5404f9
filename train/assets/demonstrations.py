"""Noisy demonstrations of every role, made by playing the real workflows with scripted experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from gradscope.errors import ConfigError
from gradscope.train.assets.experts import EXPERTS, Expert
from gradscope.train.episode import Call, Message, Problem, Task
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often demonstrations go wrong; each is a probability.

    Attributes:
        operation: Wrong operation, for each operation of a stack program.
        digit: Wrong digit, for each digit of a number.
        choice: An aggregator, evaluator or synthesizer that decides at random.
        strategy_right: An orchestrator's letter is the right one, L.
        off_role: A reply that is another role's kind of text.
    """

    operation: float = 0.27
    digit: float = 0.27
    choice: float = 0.2
    strategy_right: float = 0.5
    off_role: float = 0.03

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise ConfigError(f"noise {name} is {value}, allowed are 0 to 1.")


@dataclass(frozen=True)
class Demonstration:
    """One prompt of a real workflow and a reply to it."""

    messages: tuple[Message, ...]
    reply: str


@dataclass
class Demonstrator:
    """Plays all workflows on one task; each reply comes from the task's expert, with noise.

    Args:
        task_name: Name in `TASKS` and `EXPERTS`.
        task: The task; only its `train` split is played.
        noise: How often replies go wrong.
        workflow_weights: Workflow name to how often it is played, in proportion.
        random: The stream of all noise.
    """

    task_name: str
    task: Task
    noise: Noise
    workflow_weights: Mapping[str, float]
    random: Random
    expert: Expert = field(init=False)

    def __post_init__(self) -> None:
        self.expert = EXPERTS[self.task_name]
        self.workflows = [WORKFLOWS.get(name)(style="compact") for name in self.workflow_weights]
        self.weights = list(self.workflow_weights.values())

    def episode(self, index: int) -> list[Demonstration]:
        """Returns the demonstrations of one episode of a random workflow on one problem."""
        problem = self.task.problem("train", index)
        play = self.random.choices(self.workflows, weights=self.weights)[0].play(problem)
        demonstrations: list[Demonstration] = []
        try:
            calls = next(play)
            while True:
                replies = [self._reply(call, problem) for call in calls]
                demonstrations += [
                    Demonstration(call.messages, reply) for call, reply in zip(calls, replies, strict=True)
                ]
                calls = play.send(replies)
        except StopIteration:
            return demonstrations

    def _reply(self, call: Call, problem: Problem) -> str:
        role = call.role
        if self.random.random() < self.noise.off_role:
            role = self.random.choice(["generator", "aggregator", "evaluator", "orchestrator"])
        fields = call.messages[-1].content.split("|")
        if role == "aggregator":
            return self._choice(problem, fields[1:])
        if role == "evaluator":
            return self._judgement(problem, fields[1] if len(fields) > 1 else "")
        if role == "orchestrator":
            return "".join("L" if self._chance(self.noise.strategy_right) else "R" for _ in range(3))
        if role == "synthesizer":
            return self._synthesis(problem, fields[1:])
        strategy = fields[1] if role == "worker" and fields[1:] == ["R"] else "L"
        return self._solution(problem, strategy)

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _solution(self, problem: Problem, strategy: str) -> str:
        clean = self.expert.solve(problem.short, strategy)
        rate: float = getattr(self.noise, self.expert.mistake)
        return self.expert.spoil(clean, rate, self.random)

    def _choice(self, problem: Problem, candidates: list[str]) -> str:
        right = [k for k, text in enumerate(candidates) if self.task.grade(problem, text)]
        if not right or self._chance(self.noise.choice):
            right = list(range(max(3, len(candidates))))
        return str(self.random.choice(right) + 1)

    def _judgement(self, problem: Problem, answer: str) -> str:
        is_right = self.task.grade(problem, answer)
        if self._chance(self.noise.choice):
            is_right = self._chance(0.5)
        if is_right:
            return "y"
        clean = self.expert.solve(problem.short, "L")
        wrong = [k for k, pair in enumerate(zip(answer, clean, strict=False), start=1) if pair[0] != pair[1]]
        return f"n{wrong[0] if wrong and wrong[0] < 10 else 0}"

    def _synthesis(self, problem: Problem, works: list[str]) -> str:
        if self._chance(self.noise.choice):
            return self.random.choice(works)
        # One right solution is preferred where several stand: which of them to copy is nothing to learn.
        clean = self.expert.solve(problem.short, "L")
        right = [text for text in works if self.task.grade(problem, text)]
        return clean if clean in right else right[0] if right else self._solution(problem, "L")


def demonstrations(
    *,
    difficulty: Mapping[str, int],
    spread: Mapping[str, int],
    noise: Noise,
    workflow_weights: Mapping[str, float],
    seed: int,
) -> Iterator[Demonstration]:
    """Yields demonstrations of all tasks and roles without end.

    Args:
        difficulty: Task name to difficulty, for every task of `EXPERTS`.
        spread: Task name to the number of lengths mixed, each as often as another.
        noise: How often replies go wrong.
        workflow_weights: Workflow name to how often it is played, in proportion.
        seed: Of the problems and of the noise.
    """
    random = Random(seed)
    players = [
        Demonstrator(
            name,
            TASKS.get(name)(
                difficulty=difficulty[name], spread=spread[name], easy_weight=1, seed=seed + 1000
            ),
            noise,
            workflow_weights,
            random,
        )
        for name in EXPERTS
    ]
    index = 0
    while True:
        for player in players:
            yield from player.episode(index)
        index += 1
