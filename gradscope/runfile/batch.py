"""Rows of tables in memory: how they are put into bytes, widened to a newer layout and joined.

A batch maps table to columns; a column is an array `[n, ...]` whose axes after the first follow the layout.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.runfile.layout import Layout
from gradscope.schema import TABLES, Variable

Column = NDArray[Any]
Columns = dict[str, Column]
Batch = dict[str, Columns]

_LENGTH = struct.Struct("<I")


def encode(batch: Batch, layout: Layout) -> bytes:
    """Returns a batch as a JSON description followed by the arrays' bytes, little endian."""
    description: dict[str, Any] = {}
    parts: list[bytes] = []
    for table, columns in batch.items():
        entries: list[list[Any]] = []
        for name, column in columns.items():
            if column.dtype == object:
                entries.append([name, "str", column.tolist()])
            else:
                entries.append([name, column.dtype.str[1:], column.shape])
                parts.append(column.tobytes())
        description[table] = entries
    head = json.dumps({"layout": layout.identity, "tables": description}).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def layout_identity(payload: bytes) -> int:
    """Returns which layout the rows were written in."""
    return int(_description(payload)[0]["layout"])


def decode(payload: bytes) -> Batch:
    """Rebuilds the batch from the bytes that `encode` returned; bit-equal."""
    head, position = _description(payload)
    batch: Batch = {}
    for table, entries in head["tables"].items():
        columns = batch.setdefault(table, {})
        for name, dtype, extra in entries:
            if dtype == "str":
                columns[name] = np.array(extra, dtype=object)
                continue
            count = int(np.prod(extra, dtype=np.int64))
            flat = np.frombuffer(payload, "<" + dtype, count, position)
            columns[name] = flat.reshape(extra)
            position += flat.nbytes
    return batch


def _description(payload: bytes) -> tuple[dict[str, Any], int]:
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return json.loads(payload[_LENGTH.size : end]), end


def num_rows(columns: Mapping[str, Column], table: str) -> int:
    """Returns how many rows the columns of a table have."""
    return len(columns[TABLES[table].dim])


def empty_column(variable: Variable, num: int, layout: Layout) -> Column:
    """Returns a column of nothing but missing values."""
    if num == 1:
        return layout.empty_row(variable).copy()
    return np.full((num, *layout.shape(variable)), variable.fill, dtype=variable.numpy_dtype)


def join(batches: Sequence[Batch], layout: Layout) -> Batch:
    """Returns the rows of all batches in order, widened to `layout`.

    A column that a batch lacks, and labels that it did not know, come out as missing. Columns that the
    layout does not describe are left out.
    """
    joined: Batch = {}
    for table in TABLES:
        pieces = [batch[table] for batch in batches if table in batch]
        if pieces:
            joined[table] = _join_table(table, pieces, layout)
    return joined


def _join_table(table: str, pieces: Sequence[Columns], layout: Layout) -> Columns:
    counts = [num_rows(piece, table) for piece in pieces]
    names = dict.fromkeys(name for piece in pieces for name in piece)
    columns: Columns = {}
    for name in names:
        variable = layout.variable(table, name)
        if variable is None:
            continue
        column = empty_column(variable, sum(counts), layout)
        start = 0
        for piece, count in zip(pieces, counts, strict=True):
            if name in piece:
                values = piece[name]
                region = tuple(slice(length) for length in values.shape[1:])
                column[(slice(start, start + count), *region)] = values
            start += count
        columns[name] = column
    return columns


def select(columns: Columns, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Columns:
    """Returns some rows of a table, chosen by a mask or by positions."""
    return {name: column[rows] for name, column in columns.items()}
