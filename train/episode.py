"""The plain data that workflows, tasks and the rollout driver pass to one another.

Nothing here knows torch, a model, a task or a workflow.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal, Protocol

Style = Literal["natural", "compact"]
"""How prompts are worded: sentences for real language models, or tags for the embedded tiny model."""


@dataclass(frozen=True)
class Problem:
    """One problem of a task.

    Attributes:
        id: Stable name; the same text always has the same id.
        question: The full statement in sentences.
        short: The statement for the compact style; empty when the task has none.
        answer_format: One sentence that tells a language model how to give its final answer.
        reference: What the task grades against; only the task reads it.
    """

    id: str
    question: str
    short: str
    answer_format: str
    reference: object = field(repr=False)

    def text(self, style: Style) -> str:
        """Returns the statement as prompts of that style show it."""
        return self.short if style == "compact" else self.question


@dataclass(frozen=True)
class Message:
    """One chat message; `role` is the chat role (system, user, assistant), not the agent's role."""

    role: str
    content: str


@dataclass(frozen=True)
class Call:
    """One request of a workflow for one completion.

    Attributes:
        role: Agent role, such as `generator`.
        slot: Agent instance, such as `generator/0`.
        messages: The chat prompt.
        turn: How many times this role has been asked before in this episode, on its own critical path.
    """

    role: str
    slot: str
    messages: tuple[Message, ...]
    turn: int = 0


@dataclass(frozen=True)
class Mark:
    """What the workflow read in one reply; the driver and the task turn it into records.

    Attributes:
        in_format: Whether the reply keeps its role's format; None where the reply is a solution, whose
            format only the task knows.
        fallback: Whether the workflow had to use its fallback because nothing could be read.
        solution: The text that the task grades for this reply: its own solution, the candidate it chose, or
            the solution it judged; None where nothing can be graded.
        claims_correct: For a judge, its verdict on `solution`; None elsewhere and where it is unreadable.
        judges: True for a reply that judges a solution: it is right when its verdict is.
        copied: Whether the reply repeats a text of its prompt that it was asked to work from; None where that
            means nothing.
    """

    in_format: bool | None = None
    fallback: bool = False
    solution: str | None = None
    claims_correct: bool | None = None
    judges: bool = False
    copied: bool | None = None


@dataclass(frozen=True)
class Outcome:
    """What an episode came to.

    Attributes:
        answer: The workflow's final text, graded by the task; None when there is none.
        marks: One mark for each reply, in the order in which the calls were made.
    """

    answer: str | None
    marks: tuple[Mark, ...]


Play = Generator[list[Call], list[str], Outcome]
"""An episode in progress: yields the calls that may run side by side, is sent their replies in order."""


class Workflow(Protocol):
    """How several roles answer one problem together.

    Attributes:
        roles: Role names in the workflow's order, which files, tables and legends keep.
        slots: Slot name to role, in the workflow's order, up to the largest number of slots.
    """

    roles: tuple[str, ...]
    slots: dict[str, str]

    def play(self, problem: Problem) -> Play:
        """Starts one episode on one problem."""
        ...


class Task(Protocol):
    """Where problems come from and what makes an answer right."""

    def problem(self, split: str, index: int) -> Problem:
        """Returns problem `index` of a split (`train` or `held_out`); the splits never overlap."""
        ...

    def num_problems(self, split: str) -> int | None:
        """Returns how many problems a split has; None when there is no end to them."""
        ...

    def grade(self, problem: Problem, text: str) -> bool:
        """Returns whether a reply solves the problem. Never raises for any text."""
        ...

    def in_format(self, text: str) -> bool:
        """Returns whether a solution can be read out of the reply at all."""
        ...
