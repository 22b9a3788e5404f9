"""Math task: sums and differences of two numbers, digit by digit, without carries or borrows."""

from __future__ import annotations

from random import Random

from gradscope.train.episode import Problem
from gradscope.train.grading import Verdict, compare_answers, extract_answer
from gradscope.train.tasks.splits import draw_text, mixed_lengths


class Arithmetic:
    """Additions and subtractions of two numbers of the same length, without carries; no download.

    Args:
        difficulty: Most digits of one number, 2 to 9.
        spread: How many numbers of digits are mixed, those up to the most; never under 2.
        easy_weight: How often each smaller number of digits comes for one time of the most.
        seed: Which problems are drawn.
    """

    def __init__(self, *, difficulty: int = 5, spread: int = 4, easy_weight: int = 2, seed: int = 0) -> None:
        self.lengths = mixed_lengths(difficulty, spread, easy_weight, task="arithmetic", low=2)
        self.seed = seed

    def problem(self, split: str, index: int) -> Problem:
        """Returns problem `index` of a split; the same for the same seed."""
        short = draw_text(self._draw, seed=self.seed, split=split, index=index)
        left, operation, right = split_operation(short)
        return Problem(
            id=f"arithmetic/{short}",
            question=f"Compute {left} {operation} {right}.",
            short=short,
            answer_format="Give the final number in \\boxed{}.",
            reference=str(int(left) + int(right) if operation == "+" else int(left) - int(right)),
        )

    def num_problems(self, split: str) -> int | None:
        """Returns None: they are drawn without end, with repeats at low difficulty."""
        return None

    def grade(self, problem: Problem, text: str) -> bool:
        """Returns whether the number in the reply is the right one."""
        answer = extract_answer(text)
        return answer is not None and compare_answers(answer, str(problem.reference)) is Verdict.EQUAL

    def in_format(self, text: str) -> bool:
        """Returns whether the reply holds a number or a box."""
        return extract_answer(text) is not None

    def _draw(self, random: Random) -> str:
        num_digits = random.choice(self.lengths)
        operation = random.choice("+-")
        columns = [_column(random, operation, leading=place == 0) for place in range(num_digits)]
        left, right = ("".join(digits) for digits in zip(*columns, strict=True))
        return f"{left}{operation}{right}"


def split_operation(short: str) -> tuple[str, str, str]:
    """Returns the left number, the operation and the right number of a statement such as `12+34`."""
    operation = "+" if "+" in short else "-"
    left, _, right = short.partition(operation)
    return left, operation, right


def _column(random: Random, operation: str, *, leading: bool) -> tuple[str, str]:
    """Returns one digit of each number such that nothing is carried; a leading result is never zero."""
    while True:
        left, right = random.randint(int(leading), 9), random.randint(int(leading), 9)
        result = left + right if operation == "+" else left - right
        if int(leading) <= result <= 9:
            return str(left), str(right)
