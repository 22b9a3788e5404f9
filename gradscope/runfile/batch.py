"""Rows of tables in memory: how they are put into bytes, widened to a newer layout and joined.

A batch maps table to columns; a column is an array `[n, ...]` whose axes after the first follow the layout.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.runfile.layout import Layout
from gradscope.schema import TABLES, Variable

Column = NDArray[Any]
Columns = dict[str, Column]
Batch = dict[str, Columns]

_LENGTH = struct.Struct("<I")
_HOLE = "\0"
"""Stands for texts; no name holds it."""


def encode(batch: Batch, layout: Layout) -> bytes:
    """Returns a batch as a JSON description followed by the arrays' bytes, little endian."""
    texts: list[str] = []
    parts: list[bytes] = []
    kinds: list[Any] = []
    for table, columns in batch.items():
        kinds.append((table, len(columns)))
        for name, column in columns.items():
            dtype = column.dtype
            if dtype.kind == "O":
                kinds.append((name, None, None))
                texts.append(json.dumps(column.tolist()))
            else:
                kinds.append((name, dtype, column.shape))
                parts.append(column.tobytes())
    first, *others = _description_around_texts(layout.identity, tuple(kinds))
    head = "".join([first, *chain.from_iterable(zip(texts, others, strict=True))]).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


@lru_cache(256)
def _description_around_texts(identity: int, kinds: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the JSON description of a batch, cut where the texts of its columns belong.

    Steps of a run have the same columns again and again, so it is seldom made.

    Args:
        identity: Of the layout.
        kinds: Table and number of its columns, and behind each table name, type and shape of these columns;
            type None for texts.
    """
    description: dict[str, Any] = {}
    columns = iter(kinds)
    for table, num in columns:
        description[table] = [
            [name, "str", _HOLE] if dtype is None else [name, dtype.str[1:], shape]
            for name, dtype, shape in islice(columns, num)
        ]
    return tuple(json.dumps({"layout": identity, "tables": description}).split(json.dumps(_HOLE)))


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
