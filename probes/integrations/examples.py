"""What the examples of a data set say about their rows: slot, problem, name."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradscope.errors import ProbeError, nearest

Column = str | Callable[[Mapping[str, Any]], Any]
"""A column by name, or a function of the example."""


@dataclass(frozen=True)
class Rows:
    """Rows in the order of their examples; a list is None where nobody said how to fill it."""

    slots: list[str | None]
    problems: list[Hashable] | None = None
    row_ids: list[Hashable] | None = None

    def take(self, places: Sequence[int]) -> Rows:
        """Returns the rows at `places`, in that order."""
        return Rows(
            [self.slots[place] for place in places],
            None if self.problems is None else [self.problems[place] for place in places],
            None if self.row_ids is None else [self.row_ids[place] for place in places],
        )


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Where the slot, problem and name of an example's row are found.

    Attributes:
        slots: Slot -> role.
        slot_of: Gives the slot; a role with a single slot stands for it, None for a row of no slot.
        problem_of: Gives the problem; None where problems are not known.
        row_id_of: Gives the row's name; None where rows have none.
    """

    slots: Mapping[str, str]
    slot_of: Column = "slot"
    problem_of: Column | None = None
    row_id_of: Column | None = None

    def check_columns(self, columns: Sequence[str]) -> None:
        """Checks that the named columns are there.

        Raises:
            ProbeError: One is not.
        """
        for argument in ("slot_of", "problem_of", "row_id_of"):
            column = getattr(self, argument)
            if isinstance(column, str) and column not in columns:
                raise _no_column(argument, column, columns)

    def read(self, examples: Sequence[Mapping[str, Any]]) -> Rows:
        """Returns the rows of examples.

        Raises:
            ProbeError: A column that an example lacks, or a slot that was not declared.
        """
        return Rows(
            [self._slot(example) for example in examples],
            self._values("problem_of", examples),
            self._values("row_id_of", examples),
        )

    def slot_named(self, name: Any) -> str | None:
        """Returns the declared slot of that name, or the only slot of the role of that name.

        Raises:
            ProbeError: There is none.
        """
        if name is None or name in self.slots:
            return None if name is None else str(name)
        of_role = [slot for slot, role in self.slots.items() if role == name]
        if len(of_role) == 1:
            return of_role[0]
        if of_role:
            raise ProbeError(
                f"slot_of: '{name}' is a role with {len(of_role)} slots ({', '.join(of_role)}); say which "
                "slot each row belongs to."
            )
        raise ProbeError(
            f"slot_of: unknown slot '{name}'.{nearest(str(name), self.slots)} "
            f"Allowed: {', '.join(self.slots)} (or None for a row of no slot)."
        )

    def _slot(self, example: Mapping[str, Any]) -> str | None:
        return self.slot_named(_value("slot_of", self.slot_of, example))

    def _values(self, argument: str, examples: Sequence[Mapping[str, Any]]) -> list[Hashable] | None:
        column = getattr(self, argument)
        if column is None:
            return None
        return [hashable(_value(argument, column, example)) for example in examples]


def hashable(value: Any) -> Hashable:
    """Returns what stands for a value as a label: itself, or its JSON where it is a list or a mapping."""
    return value if isinstance(value, Hashable) else json.dumps(value, sort_keys=True, default=str)


def _value(argument: str, column: Column, example: Mapping[str, Any]) -> Any:
    if callable(column):
        return column(example)
    if column not in example:
        raise _no_column(argument, column, list(example))
    return example[column]


def _no_column(argument: str, column: str, columns: Sequence[str]) -> ProbeError:
    return ProbeError(
        f"{argument}: the examples have no column '{column}'.{nearest(column, columns)} Columns: "
        f"{', '.join(columns)}. Name a column, or give a function of the example."
    )
