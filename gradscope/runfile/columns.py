"""Puts labelled values where their labels stand in the file's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.runfile.batch import Column, Columns, empty_column
from gradscope.runfile.layout import Layout
from gradscope.schema import Variable, base_dim

Row = dict[str, Any]
"""Column to a number, a text, a mapping by label, an array, or a `Placed` array."""


Notice = Callable[[str, str], None]
"""Takes a key and a sentence; of each key only the first is told."""


_WIDE = ("i8", "i4", "f8", "f4")
_SMALL = 2**24
"""Whole numbers below are held exactly by each of these types."""
_PLAIN = frozenset({float, np.float64})


@dataclass(frozen=True)
class Placed:
    """An array whose axes carry labels, to be put where those labels stand in the file."""

    labels: tuple[Sequence[str], ...]
    values: NDArray[Any]


def columns_of(table: str, rows: Sequence[Row], layout: Layout, notice: Notice) -> Columns:
    """Returns rows given one by one as columns; what a row lacks, or has as None, is missing.

    So is a number that its variable cannot hold; `notice` is told.
    """
    columns: Columns = {}
    is_single = len(rows) == 1
    for name in rows[0] if is_single else dict.fromkeys(name for row in rows for name in row):
        variable = layout.variable(table, name)
        assert variable is not None, f"{table}.{name} is not in the layout"
        ready = _ready(variable, rows[0][name], layout, notice) if is_single else None
        if ready is not None:
            columns[name] = ready
            continue
        column = columns[name] = empty_column(variable, len(rows), layout)
        for position, row in enumerate(rows):
            if row.get(name) is not None:
                _assign(column, position, variable, row[name], layout, notice)
    return columns


def _ready(variable: Variable, value: Any, layout: Layout, notice: Notice) -> Column | None:
    """Returns the column of a single row in one go, where its value is just what the variable holds.

    That is what nearly all values of a step are, and several times as fast as `_assign`; None for the others.
    """
    kind, dtype, num_dims = type(value), variable.dtype, len(variable.dims)
    if kind is float:
        return np.array([value]) if num_dims == 1 and dtype == "f8" else None
    if kind is int:
        holds = num_dims == 1 and dtype in _WIDE and -_SMALL < value < _SMALL
        return np.array([value], dtype) if holds else None
    if kind is dict and dtype == "f8" and tuple(value) == layout.labels[base_dim(variable.dims[1])]:
        numbers = list(value.values())
        return np.array([numbers]) if _PLAIN.issuperset(map(type, numbers)) else None
    if kind is Placed and _is_whole(variable, value, layout):
        return np.asarray(fitted(value.values, variable, notice)).astype(dtype, copy=False)[np.newaxis]
    return None


def _is_whole(variable: Variable, value: Placed, layout: Layout) -> bool:
    """Returns whether an array has just the labels of the file, in their order."""
    axes = zip(variable.dims[1:], value.labels, strict=True)
    return all(tuple(labels) == layout.labels[base_dim(dim)] for dim, labels in axes)


def _assign(
    column: Column, position: int, variable: Variable, value: Any, layout: Layout, notice: Notice
) -> None:
    if isinstance(value, Placed):
        values = fitted(value.values, variable, notice)
        if _is_whole(variable, value, layout):
            column[position] = values
        else:
            axes = zip(variable.dims[1:], value.labels, strict=True)
            places = [[layout.index(dim)[label] for label in labels] for dim, labels in axes]
            column[position][np.ix_(*places)] = values
    elif isinstance(value, Mapping):
        index = layout.index(variable.dims[1])
        is_float = variable.dtype.startswith("f")
        row = column[position]
        for label, inner in value.items():
            plain = is_float and isinstance(inner, float)
            row[index[label]] = inner if plain else _stored(inner, variable, notice)
    elif variable.dtype == "str":
        column[position] = text(value)
    elif column.ndim > 1:
        column[position] = value
    else:
        column[position] = _stored(value, variable, notice)


def _stored(value: Any, variable: Variable, notice: Notice) -> Any:
    """Returns one number as the variable stores it, missing where it is none."""
    if type(value) is int and -_SMALL < value < _SMALL and variable.dtype in _WIDE:
        return value
    found = number(value)
    if found is not None:
        return fitted(found, variable, notice)
    if value is not None:
        kind = type(value).__name__
        notice(f"{variable.name} kind", f"'{variable.name}' holds a {kind}, no number; it is left out.")
    return variable.fill


def number(value: Any) -> float | None:
    """Returns a number, array of one or tensor of one as a float; None when it is none of these."""
    if isinstance(value, float):  # as numpy's own is
        return value
    if isinstance(value, str) or value is None:
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def entries(values: Any) -> list[Any] | None:
    """Returns the entries of a sequence, array or tensor; None when it is none of these."""
    if isinstance(values, str | bytes):
        return None
    try:
        return list(values)
    except TypeError:
        return None


def text(value: Any) -> str:
    """Returns a text that HDF5 can hold: no NUL, no half of a surrogate pair; such become U+FFFD."""
    return str(value).encode("utf-8", "surrogatepass").decode("utf-8", "replace").replace("\0", "\ufffd")


def fitted(values: float | NDArray[Any], variable: Variable, notice: Notice) -> float | NDArray[Any]:
    """Returns numbers as the variable stores them; a count that is not finite or too large is missing."""
    if not variable.dtype.startswith("i"):
        return values
    numbers = np.rint(values)
    if variable.dtype in _WIDE and all(-_SMALL < each < _SMALL for each in numbers.ravel().tolist()):
        return numbers  # the usual case, several times as fast as what follows
    limits = np.iinfo(variable.dtype)
    # As a float the largest i8 is rounded up to one more, hence `<`.
    fits = (numbers >= limits.min) & (numbers < float(limits.max) + 1)
    if (np.isfinite(numbers) & ~fits).any():
        notice(
            f"{variable.name} range",
            f"'{variable.name}' holds numbers beyond {variable.dtype} ({limits.max}); they are left out.",
        )
    return np.where(fits, numbers, variable.fill)
