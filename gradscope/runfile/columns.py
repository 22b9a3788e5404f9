"""Puts labelled values where their labels stand in the file's arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.runfile.batch import Column, Columns, empty_column
from gradscope.runfile.layout import Layout
from gradscope.schema import Variable

Row = dict[str, Any]
"""Column to a number, a text, a mapping by label, an array, or a `Placed` array."""


@dataclass(frozen=True)
class Placed:
    """An array whose axes carry labels, to be put where those labels stand in the file."""

    labels: tuple[Sequence[str], ...]
    values: NDArray[Any]


def columns_of(table: str, rows: Sequence[Row], layout: Layout) -> Columns:
    """Returns rows given one by one as columns; what a row lacks, or has as None, is missing."""
    columns: Columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        variable = layout.variable(table, name)
        assert variable is not None, f"{table}.{name} is not in the layout"
        column = columns[name] = empty_column(variable, len(rows), layout)
        for position, row in enumerate(rows):
            if row.get(name) is not None:
                _assign(column, position, variable, row[name], layout)
    return columns


def _assign(column: Column, position: int, variable: Variable, value: Any, layout: Layout) -> None:
    if isinstance(value, Placed):
        axes = zip(variable.dims[1:], value.labels, strict=True)
        places = [[layout.index(dim)[label] for label in labels] for dim, labels in axes]
        column[position][np.ix_(*places)] = fitted(value.values, variable)
    elif isinstance(value, Mapping):
        index = layout.index(variable.dims[1])
        for label, inner in value.items():
            found = number(inner)
            if found is not None:
                column[position, index[label]] = fitted(found, variable)
    elif variable.dtype == "str":
        column[position] = text(value)
    elif column.ndim > 1:
        column[position] = value
    elif (found := number(value)) is not None:
        column[position] = fitted(found, variable)


def number(value: Any) -> float | None:
    """Returns a number, array of one or tensor of one as a float; None when it is none of these."""
    if isinstance(value, str) or value is None:
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def text(value: Any) -> str:
    """Returns a text that HDF5 can hold: no NUL, no half of a surrogate pair; such become U+FFFD."""
    return str(value).encode("utf-8", "surrogatepass").decode("utf-8", "replace").replace("\0", "\ufffd")


def fitted(values: Any, variable: Variable) -> Any:
    """Returns numbers as the variable stores them; what is no finite number becomes a missing count."""
    if not variable.dtype.startswith("i"):
        return values
    if np.ndim(values) == 0:
        return round(float(values)) if math.isfinite(values) else variable.fill
    return np.where(np.isfinite(values), np.rint(values), variable.fill)
