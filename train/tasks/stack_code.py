"""Code task: write a stack program for a left-to-right expression; judged by running it on test cases."""

from __future__ import annotations

from random import Random

from gradscope.train.episode import Problem
from gradscope.train.grading import code_blocks, last_box, visible_text
from gradscope.train.tasks import stack_machine
from gradscope.train.tasks.splits import draw_text, mixed_lengths

_OPERANDS = "ab0123456789"
_TESTS = ((2, 7), (5, -3), (0, 4), (-6, 1), (11, 13))
"""Values of (a, b); a program is right when it gives the expression's value on all of them."""

_QUESTION = (
    "A stack machine runs programs of one-character instructions. A digit pushes that number; a and b push "
    "the inputs a and b; +, - and * pop y from the top of the stack, then x, and push x + y, x - y or x * y. "
    "A program must leave exactly one value on the stack. Write a program that computes {expression}, where "
    "the operations are applied strictly from left to right, without precedence."
)
_ANSWER_FORMAT = "Give the program alone in a code fence, as in\n```\nab+2*\n```"


class StackCode:
    """Stack programs for left-to-right expressions over a, b and digits; no download.

    Args:
        difficulty: Most operations in one expression, 1 to 9.
        spread: How many numbers of operations are mixed, those up to the most.
        easy_weight: How often each shorter expression comes for one time of the longest.
        seed: Which problems are drawn.
    """

    def __init__(self, *, difficulty: int = 6, spread: int = 5, easy_weight: int = 1, seed: int = 0) -> None:
        self.lengths = mixed_lengths(difficulty, spread, easy_weight, task="stack_code", low=1)
        self.seed = seed

    def problem(self, split: str, index: int) -> Problem:
        """Returns problem `index` of a split; the same for the same seed."""
        expression = draw_text(self._draw, seed=self.seed, split=split, index=index)
        values = tuple(evaluate(expression, {"a": a, "b": b}) for a, b in _TESTS)
        return Problem(
            id=f"stack_code/{expression}",
            question=_QUESTION.format(expression=expression),
            short=expression,
            answer_format=_ANSWER_FORMAT,
            reference=values,
        )

    def num_problems(self, split: str) -> int | None:
        """Returns None: there is no end to them."""
        return None

    def grade(self, problem: Problem, text: str) -> bool:
        """Returns whether the program in the reply gives the right value on every test case."""
        program = read_program(text)
        values = tuple(stack_machine.run(program, {"a": a, "b": b}) for a, b in _TESTS)
        return values == problem.reference

    def in_format(self, text: str) -> bool:
        """Returns whether the reply holds a string of instructions."""
        return stack_machine.is_program(read_program(text))

    def _draw(self, random: Random) -> str:
        num_operations = random.choice(self.lengths)
        while True:
            operands = [random.choice(_OPERANDS) for _ in range(num_operations + 1)]
            if set(operands) & set(stack_machine.VARIABLES):
                break
        operations = [random.choice("+-*") for _ in range(num_operations)]
        return operands[0] + "".join(
            op + operand for op, operand in zip(operations, operands[1:], strict=True)
        )


def read_program(text: str) -> str:
    """Returns the program of a reply: its last closed code fence, else its last box, else its whole text."""
    blocks = code_blocks(text)
    if blocks:
        return blocks[-1][1]
    box = last_box(text)
    return visible_text(text) if box is None else box


def evaluate(expression: str, variables: dict[str, int]) -> int:
    """Returns the value of a left-to-right expression."""
    operands = [variables[symbol] if symbol in variables else int(symbol) for symbol in expression[::2]]
    value = operands[0]
    for operation, operand in zip(expression[1::2], operands[1:], strict=True):
        value = stack_machine.OPERATIONS[operation](value, operand)
    return value
