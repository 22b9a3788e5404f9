"""Single: one generator answers; the control for every workflow of several roles."""

from __future__ import annotations

from gradscope.train.episode import Call, Mark, Outcome, Play, Problem, Style
from gradscope.train.workflows.options import check_style
from gradscope.train.workflows.prompts import generator_prompt


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
