"""Plays many episodes side by side: every round asks the engine for all pending calls at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradscope.errors import ConfigError
from gradscope.train.episode import Call, Mark, Outcome, Play, Problem, Task, Workflow
from gradscope.train.rollout.chat import Chat
from gradscope.train.rollout.engine import Completion, Engine, Request
from gradscope.train.rollout.streams import Stream


@dataclass(frozen=True)
class Row:
    """One sampled reply with its prompt.

    Attributes:
        id: Leads to the text: step, problem, sample, slot and turn.
        slot: Agent instance that replied.
        role: Its role.
        turn: How many times the role had been asked before.
        prompt_ids: Token ids of the prompt.
        completion_ids: Sampled token ids, exactly those that are trained on.
        logprobs: Log-probability of each of them at the sampling temperature, `[T]`.
        entropy: Entropy of the sampling distribution at each of them, nats, `[T]`.
        truncated: Whether the reply was cut before an end token.
        text: The reply as the workflow read it.
        mark: What the workflow read in it.
        in_format: Whether the reply keeps its role's format.
        own: 1 or 0 for a reply that is right or wrong by itself; NaN where nothing can be graded.
    """

    id: str
    slot: str
    role: str
    turn: int
    prompt_ids: tuple[int, ...] = field(repr=False)
    completion_ids: tuple[int, ...] = field(repr=False)
    logprobs: NDArray[np.float32] = field(repr=False)
    entropy: NDArray[np.float32] = field(repr=False)
    truncated: bool
    text: str
    mark: Mark
    in_format: bool
    own: float


@dataclass(frozen=True)
class Episode:
    """One play of a workflow on one problem.

    Attributes:
        id: Step, problem and sample.
        problem: The problem.
        problem_index: Its place in the step.
        sample: Number of the episode among those of its problem.
        rows: Its replies, in the order of the calls; empty when it was dropped.
        answer: The workflow's final text.
        correct: Whether that solves the problem.
        dropped: Why the episode was given up; None for a finished one.
    """

    id: str
    problem: Problem
    problem_index: int
    sample: int
    rows: tuple[Row, ...]
    answer: str | None
    correct: bool
    dropped: str | None = None


@dataclass
class _Live:
    """An episode in progress, the calls it waits for, and what was said so far."""

    id: str
    problem: Problem
    problem_index: int
    sample: int
    play: Play
    pending: list[Call] = field(default_factory=list)
    said: list[tuple[Call, tuple[int, ...], Completion, str]] = field(default_factory=list)
    outcome: Outcome | None = None
    dropped: str | None = None

    def uniforms(self, call: Call, stream: Stream, num: int, *, slot: int) -> NDArray[np.float64]:
        """Returns the random numbers of the reply to a call."""
        return stream.uniforms(num, problem=self.problem_index, sample=self.sample, slot=slot, turn=call.turn)


def play_episodes(
    workflow: Workflow,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int,
    engine: Engine,
    chat: Chat,
    routing: Mapping[str, str],
    stream: Stream,
    max_prompt_tokens: int,
    greedy: bool = False,
) -> list[Episode]:
    """Plays `group_size` episodes on each problem, all of them side by side.

    Args:
        workflow: How roles answer together.
        task: Grades what they say.
        problems: Problems of the step.
        group_size: Episodes on each.
        engine: Completes prompts.
        chat: Turns messages into ids and ids into text.
        routing: Slot to policy.
        stream: Source of random numbers.
        max_prompt_tokens: An episode that needs a longer prompt is dropped.
        greedy: Whether to take the most probable token instead of sampling.

    Returns:
        Episodes ordered by problem, then sample.

    Raises:
        ConfigError: The workflow asks for nothing, calls a slot it lacks, or does not mark each reply.
    """
    lives = [
        _Live(f"{stream.step}-{i}-{k}", problem, i, k, workflow.play(problem))
        for i, problem in enumerate(problems)
        for k in range(group_size)
    ]
    for live in lives:
        _go_on(live, None, workflow)
    slots = list(workflow.slots)
    while waiting := [live for live in lives if live.pending]:
        asked = [live for live in waiting if _fits(live, chat, max_prompt_tokens)]
        requests = [
            Request(
                chat.encode(call.messages),
                routing[call.slot],
                live.uniforms(call, stream, engine.max_new_tokens, slot=slots.index(call.slot)),
            )
            for live in asked
            for call in live.pending
        ]
        answers = iter(engine.generate(requests, greedy=greedy))
        for live in asked:
            _go_on(live, _hear(live, answers, chat), workflow)
    grades = _Grades(task)
    return [_finish(live, grades, task) for live in lives]


def _fits(live: _Live, chat: Chat, max_prompt_tokens: int) -> bool:
    """Returns whether every pending prompt is short enough; gives the episode up otherwise."""
    for call in live.pending:
        length = len(chat.encode(call.messages))
        if length > max_prompt_tokens:
            live.dropped = f"{call.slot} has a prompt of {length} tokens, allowed are {max_prompt_tokens}"
            live.pending = []
            live.play.close()
            return False
    return True


def _hear(live: _Live, answers: Iterator[Completion], chat: Chat) -> list[str]:
    """Returns the replies to an episode's pending calls."""
    replies = []
    for call in live.pending:
        completion = next(answers)
        replies.append(chat.decode(completion.ids))
        live.said.append((call, chat.encode(call.messages), completion, replies[-1]))
    return replies


def _go_on(live: _Live, replies: list[str] | None, workflow: Workflow) -> None:
    """Takes an episode from its replies, None at its beginning, to its next calls or to its outcome."""
    try:
        live.pending = next(live.play) if replies is None else live.play.send(replies)
        broken = _broken_by_calls(live.pending, workflow)
    except StopIteration as finished:
        live.pending, live.outcome = [], finished.value
        broken = _broken_by_outcome(live.outcome, num_replies=len(live.said))
    if broken:
        name = type(workflow).__name__
        raise ConfigError(f"workflow {name} {broken} (on problem '{live.problem.id}').")


_NO_CALLS = "asked for no reply; each list of calls that it yields must hold at least one"


def _broken_by_calls(calls: Sequence[Call], workflow: Workflow) -> str:
    """Returns which rule of workflows the calls break; empty when they keep them."""
    if not calls:
        return _NO_CALLS
    strange = [call.slot for call in calls if call.slot not in workflow.slots]
    known = ", ".join(workflow.slots)
    return f"called the unknown slot '{strange[0]}'; its slots are {known}" if strange else ""


def _broken_by_outcome(outcome: object, *, num_replies: int) -> str:
    """Returns which rule of workflows the end of an episode breaks; empty when it keeps them."""
    if not num_replies:
        return _NO_CALLS
    if not isinstance(outcome, Outcome):
        return f"ended with {outcome!r:.60}; it must return an Outcome"
    if len(outcome.marks) != num_replies:
        return f"gave {len(outcome.marks)} marks for {num_replies} replies; each reply needs one, in order"
    return ""


class _Grades:
    """Grades each text of a problem once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._known: dict[tuple[str, str], bool] = {}

    def __call__(self, problem: Problem, text: str) -> bool:
        key = (problem.id, text)
        if key not in self._known:
            self._known[key] = bool(self.task.grade(problem, text))
        return self._known[key]


def _finish(live: _Live, grades: _Grades, task: Task) -> Episode:
    place = (live.id, live.problem, live.problem_index, live.sample)
    if live.outcome is None:
        return Episode(*place, rows=(), answer=None, correct=False, dropped=live.dropped)
    rows = []
    for (call, prompt_ids, completion, text), mark in zip(live.said, live.outcome.marks, strict=True):
        in_format = task.in_format(text) if mark.in_format is None else mark.in_format
        rows.append(
            Row(
                id=f"{live.id}-{call.slot}-{call.turn}",
                slot=call.slot,
                role=call.role,
                turn=call.turn,
                prompt_ids=prompt_ids,
                completion_ids=completion.ids,
                logprobs=completion.logprobs,
                entropy=completion.entropy,
                truncated=completion.truncated,
                text=text,
                mark=mark,
                in_format=in_format,
                own=_own(mark, live.problem, grades),
            )
        )
    answer = live.outcome.answer
    correct = answer is not None and grades(live.problem, answer)
    return Episode(*place, rows=tuple(rows), answer=answer, correct=correct)


def _own(mark: Mark, problem: Problem, grades: _Grades) -> float:
    """Returns whether a reply is right by itself: its solution is, or its verdict on a solution is."""
    if mark.solution is None:
        return math.nan
    correct = grades(problem, mark.solution)
    return float(mark.claims_correct is correct if mark.judges else correct)
