"""A tiny stack machine: runs programs of one-character instructions and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Mapping

VARIABLES = "ab"
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
INSTRUCTIONS = frozenset("0123456789" + VARIABLES + "".join(OPERATIONS))
MAX_LENGTH = 100
"""Longest program that is run; it bounds time and the size of the numbers."""


def is_program(text: str) -> bool:
    """Returns whether the text, spacing aside, is one or more instructions and not too long."""
    bare = "".join(text.split())
    return 0 < len(bare) <= MAX_LENGTH and INSTRUCTIONS.issuperset(bare)


def run(program: str, variables: Mapping[str, int]) -> int | None:
    """Returns the one value that a program leaves on the stack; None when it fails or leaves another number.

    A digit or a variable is pushed. `+`, `-` and `*` pop y, then x, and push x + y, x - y or x * y.
    """
    if not is_program(program):
        return None
    stack: list[int] = []
    for instruction in "".join(program.split()):
        if instruction in OPERATIONS:
            if len(stack) < 2:
                return None
            right, left = stack.pop(), stack.pop()
            stack.append(OPERATIONS[instruction](left, right))
        else:
            stack.append(variables[instruction] if instruction in VARIABLES else int(instruction))
    return stack[0] if len(stack) == 1 else None
