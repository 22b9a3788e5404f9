"""Single: one generator answers; the control for every workflow of several roles."""

from __future__ import annotations

from gradscope.train.episode import Call, Mark, Message, Outcome, Play, Problem, Style
from gradscope.train.workflows.options import check_style
from gradscope.train.workflows.prompts import compact, natural, statement


class Single:
    """One generator answers the problem alone.

    Args:
        style: How prompts are worded.
    """

    def __init__(self, *, style: Style = "natural") -> None:
        check_style(style)
        self.style: Style = style
        self.roles: tuple[str, ...] = ("generator",)
        self.slots: dict[str, str] = {"generator/0": "generator"}

    def play(self, problem: Problem) -> Play:
        """Asks the generator once."""
        (answer,) = yield [Call("generator", "generator/0", generator_prompt(problem, self.style))]
        return Outcome(answer, (Mark(solution=answer),))


def generator_prompt(problem: Problem, style: Style) -> tuple[Message, ...]:
    """Returns the prompt of a generator that answers from the problem alone, the same in all workflows."""
    text = statement(problem, style)
    if style == "compact":
        return compact("generator", text)
    return natural(
        "You are the generator: you solve problems carefully, step by step.", text, problem.answer_format
    )
