"""Eval-Opt: a generator answers, an evaluator judges, the generator refines, until judged correct."""

from __future__ import annotations

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
from gradscope.train.workflows.replies import is_copy, read_verdict


class EvalOpt:
    """A generator answers, an evaluator judges and the generator refines; each turn is a slot of its own.

    Args:
        max_iterations: Most generator turns, 1 to 9; each is followed by an evaluation.
        style: How prompts are worded.
    """

    def __init__(self, *, max_iterations: int = 3, style: Style = "natural") -> None:
        check_style(style)
        check_count("max_iterations", max_iterations)
        self.style: Style = style
        self.max_iterations = max_iterations
        self.roles: tuple[str, ...] = ("generator", "evaluator")
        self.slots: dict[str, str] = {
            f"{role}/{turn}": role for turn in range(max_iterations) for role in self.roles
        }

    def play(self, problem: Problem) -> Play:
        """Refines until the evaluator says correct; an unreadable verdict keeps refining, with its text."""
        marks: list[Mark] = []
        prompt = generator_prompt(problem, self.style)
        previous: str | None = None
        answer = ""
        for turn in range(self.max_iterations):
            (answer,) = yield [Call("generator", f"generator/{turn}", prompt, turn)]
            marks.append(
                Mark(solution=answer, copied=None if previous is None else is_copy(answer, [previous]))
            )
            judge_prompt = self._evaluator_prompt(problem, answer)
            (reply,) = yield [Call("evaluator", f"evaluator/{turn}", judge_prompt, turn)]
            verdict = read_verdict(reply, style=self.style)
            marks.append(
                Mark(
                    in_format=verdict.in_format,
                    fallback=verdict.correct is None,
                    solution=answer,
                    claims_correct=verdict.correct,
                    judges=True,
                    copied=not verdict.in_format and is_copy(reply, [answer]),
                )
            )
            if verdict.correct:
                break
            prompt = self._refine_prompt(problem, answer, verdict.feedback)
            previous = answer
        return Outcome(answer, tuple(marks))

    def _evaluator_prompt(self, problem: Problem, answer: str) -> tuple[Message, ...]:
        text = statement(problem, self.style)
        if self.style == "compact":
            return compact("evaluator", text, compact_field(answer))
        return natural(
            "You are the evaluator: you check a solution of a problem and say what is wrong with it.",
            f"Problem:\n{text}",
            f"Solution:\n{quote(answer)}",
            "Check the solution. If it is wrong, say what has to change. End with your verdict: "
            "\\boxed{Correct} or \\boxed{Incorrect}. Give no solution of your own.",
        )

    def _refine_prompt(self, problem: Problem, previous: str, feedback: str) -> tuple[Message, ...]:
        text = statement(problem, self.style)
        if self.style == "compact":
            return compact("generator", text, compact_field(previous), compact_field(feedback))
        return natural(
            "You are the generator: you solve problems carefully, step by step.",
            text,
            f"Your previous solution:\n{quote(previous)}",
            f"Feedback of an evaluator:\n{quote(feedback)}",
            f"Solve the problem again and use the feedback where it is right. {problem.answer_format}",
        )
