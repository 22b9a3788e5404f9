"""Orch-Workers: an orchestrator proposes strategies, workers follow one each, a synthesizer answers."""

from __future__ import annotations

from collections.abc import Sequence

from gradscope.train.episode import Call, Mark, Message, Outcome, Play, Problem, Style
from gradscope.train.workflows.options import check_count, check_style
from gradscope.train.workflows.prompts import compact, compact_field, natural, quote, statement
from gradscope.train.workflows.replies import is_copy, read_strategies


class OrchWorkers:
    """An orchestrator proposes strategies, one worker follows each, a synthesizer gives the final answer.

    Args:
        num_workers: Most strategies and workers, 1 to 9; fewer strategies mean fewer workers, never none.
        style: How prompts are worded.
    """

    def __init__(self, *, num_workers: int = 3, style: Style = "natural") -> None:
        check_style(style)
        check_count("num_workers", num_workers)
        self.style: Style = style
        self.num_workers = num_workers
        self.roles: tuple[str, ...] = ("orchestrator", "worker", "synthesizer")
        self.slots: dict[str, str] = {"orchestrator/0": "orchestrator"}
        self.slots |= {f"worker/{k}": "worker" for k in range(num_workers)}
        self.slots["synthesizer/0"] = "synthesizer"

    def play(self, problem: Problem) -> Play:
        """Asks the orchestrator, then as many workers as there are strategies, then the synthesizer."""
        (plan,) = yield [Call("orchestrator", "orchestrator/0", self._orchestrator_prompt(problem))]
        strategies = read_strategies(plan, max_strategies=self.num_workers, style=self.style)
        works = yield [
            Call("worker", f"worker/{k}", self._worker_prompt(problem, strategy))
            for k, strategy in enumerate(strategies.texts)
        ]
        (answer,) = yield [Call("synthesizer", "synthesizer/0", self._synthesizer_prompt(problem, works))]
        plan_mark = Mark(in_format=strategies.in_format, fallback=strategies.fallback)
        work_marks = (Mark(solution=work) for work in works)
        return Outcome(answer, (plan_mark, *work_marks, Mark(solution=answer, copied=is_copy(answer, works))))

    def _orchestrator_prompt(self, problem: Problem) -> tuple[Message, ...]:
        text = statement(problem, self.style)
        if self.style == "compact":
            return compact("orchestrator", text)
        return natural(
            "You are the orchestrator: you plan how others can solve a problem; you do not solve it.",
            f"Problem:\n{text}",
            f"Propose up to {self.num_workers} different strategies. Write each on a line of its own, as in\n"
            "STRATEGY 1: what to do",
        )

    def _worker_prompt(self, problem: Problem, strategy: str) -> tuple[Message, ...]:
        text = statement(problem, self.style)
        if self.style == "compact":
            return compact("worker", text, compact_field(strategy))
        return natural(
            "You are a worker: you solve a problem by the strategy you are given.",
            f"Problem:\n{text}",
            f"Strategy:\n{quote(strategy)}",
            f"Solve the problem by this strategy. {problem.answer_format}",
        )

    def _synthesizer_prompt(self, problem: Problem, works: Sequence[str]) -> tuple[Message, ...]:
        text = statement(problem, self.style)
        if self.style == "compact":
            return compact("synthesizer", text, *map(compact_field, works))
        return natural(
            "You are the synthesizer: you combine the work of several workers into one final solution.",
            f"Problem:\n{text}",
            *(f"Work of worker {k}:\n{quote(work)}" for k, work in enumerate(works, start=1)),
            f"Give the final solution. {problem.answer_format}",
        )
