"""Who can solve the generated tasks: right solutions by either strategy, and plausible mistakes in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from gradscope.train.tasks.arithmetic import split_operation


@dataclass(frozen=True)
class Expert:
    """Solves one task.

    Attributes:
        solve: Compact statement and strategy letter to a solution. `L` keeps the order of operands and is
            right; `R` swaps the operands of each operation, which is wrong where a difference is taken.
        spoil: A solution, a rate in [0, 1] and a random stream to the solution with mistakes at that rate
            for each place where one can be made.
        mistake: What a mistake changes; names its rate in `Noise`.
    """

    solve: Callable[[str, str], str]
    spoil: Callable[[str, float, Random], str]
    mistake: Literal["operation", "digit"]


def _solve_stack_code(expression: str, strategy: str) -> str:
    operands, operations = expression[::2], expression[1::2]
    if strategy == "R":
        return operands[::-1] + operations
    return operands[0] + "".join(b + op for b, op in zip(operands[1:], operations, strict=True))


def _spoil_stack_code(program: str, rate: float, random: Random) -> str:
    """Replaces operations by others; operands stay, so that mistakes have one kind."""
    return "".join(
        random.choice([op for op in "+-*" if op != symbol])
        if symbol in "+-*" and random.random() < rate
        else symbol
        for symbol in program
    )


def _solve_arithmetic(statement: str, strategy: str) -> str:
    left, operation, right = split_operation(statement)
    if operation == "+":
        return str(int(left) + int(right))
    width = len(left)
    return f"{'-' if strategy == 'R' else ''}{int(left) - int(right):0{width}d}"


def _spoil_arithmetic(number: str, rate: float, random: Random) -> str:
    """Moves digits up by one: one kind of mistake, which training can unlearn as one thing."""
    return "".join(
        str((int(symbol) + 1) % 10) if symbol.isdigit() and random.random() < rate else symbol
        for symbol in number
    )


EXPERTS = {
    "stack_code": Expert(_solve_stack_code, _spoil_stack_code, "operation"),
    "arithmetic": Expert(_solve_arithmetic, _spoil_arithmetic, "digit"),
}
