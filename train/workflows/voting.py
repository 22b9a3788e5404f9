"""Voting: N generators answer side by side, an aggregator picks one of the candidates by its number."""

from __future__ import annotations

from collections.abc import Sequence

from gradscope.train.episode import Call, Mark, Message, Outcome, Play, Problem, Style
from gradscope.train.workflows.options import check_count, check_style
from gradscope.train.workflows.prompts import (
    compact,
    compact_field,
    generator_prompt,
    natural,
    quote,
    statement,
)
from gradscope.train.workflows.replies import is_copy, read_choice


class Voting:
    """Generators answer side by side; an aggregator picks the final candidate by its number.

    Args:
        num_generators: How many candidates there are, 1 to 9.
        style: How prompts are worded.
    """

    def __init__(self, *, num_generators: int = 3, style: Style = "natural") -> None:
        check_style(style)
        check_count("num_generators", num_generators)
        self.style: Style = style
        self.roles: tuple[str, ...] = ("generator", "aggregator")
        self.slots: dict[str, str] = {f"generator/{k}": "generator" for k in range(num_generators)}
        self.slots["aggregator/0"] = "aggregator"

    def play(self, problem: Problem) -> Play:
        """Asks all generators at once, then the aggregator; an unreadable choice is candidate 1."""
        prompt = generator_prompt(problem, self.style)
        generators = [slot for slot, role in self.slots.items() if role == "generator"]
        candidates = yield [Call("generator", slot, prompt) for slot in generators]
        (reply,) = yield [Call("aggregator", "aggregator/0", self._aggregator_prompt(problem, candidates))]
        choice = read_choice(reply, num_candidates=len(candidates), style=self.style)
        chosen = candidates[choice.index]
        mark = Mark(
            in_format=choice.in_format,
            fallback=choice.fallback,
            solution=chosen,
            copied=not choice.in_format and is_copy(reply, candidates),
        )
        return Outcome(chosen, (*(Mark(solution=candidate) for candidate in candidates), mark))

    def _aggregator_prompt(self, problem: Problem, candidates: Sequence[str]) -> tuple[Message, ...]:
        text = statement(problem, self.style)
        if self.style == "compact":
            return compact("aggregator", text, *map(compact_field, candidates))
        return natural(
            "You are the aggregator: you compare candidate solutions of a problem and choose the best one.",
            f"Problem:\n{text}",
            *(f"Solution {k}:\n{quote(candidate)}" for k, candidate in enumerate(candidates, start=1)),
            f"Choose the solution that is most likely correct. End with its number, 1 to {len(candidates)}, "
            "as in \\boxed{1}. Give no solution of your own.",
        )
