"""Keeps apart, of rows that are in journals only, what is to be read later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradscope.runfile.batch import Batch, empty_column, join, num_rows
from gradscope.runfile.content import Content
from gradscope.runfile.layout import Layout
from gradscope.runfile.reading import Deferred, Lazy, nothing
from gradscope.schema import SUPERSEDED, TABLES


def without_lazy(batches: Sequence[Batch], layout: Layout, lazy: Lazy) -> tuple[list[Batch], Batch]:
    """Returns batches without their lazy columns, and these joined, beside the tables' coordinates."""
    if lazy is nothing:
        return list(batches), {}
    kept: list[Batch] = []
    left: list[Batch] = []
    for rows in batches:
        own: Batch = {}
        other: Batch = {}
        for table, columns in rows.items():
            names = {name for name in columns if _is_lazy(table, name, layout, lazy)}
            own[table] = {name: column for name, column in columns.items() if name not in names}
            other[table] = {name: columns[name] for name in (TABLES[table].dim, *names)}
        kept.append(own)
        left.append(other)
    return kept, join(left, layout)


def _is_lazy(table: str, name: str, layout: Layout, lazy: Lazy) -> bool:
    variable = layout.variable(table, name)
    return variable is not None and lazy(table, variable)


def with_tails(
    stored: Sequence[Deferred], tails: Batch, base: Content, layout: Layout
) -> tuple[Deferred, ...]:
    """Returns the columns left on the disk, each with what journals add to it."""
    return tuple(_with_tails(stored, tails, base, layout))


def _with_tails(
    stored: Sequence[Deferred], tails: Batch, base: Content, layout: Layout
) -> Iterator[Deferred]:
    in_file = set()
    for column in stored:
        rows = tails.get(column.table)
        if rows is None or column.group.startswith(f"/{SUPERSEDED}/"):
            yield column
            continue
        name = column.variable.name
        in_file.add((column.table, name))
        missing = empty_column(column.variable, num_rows(rows, column.table), layout)
        yield replace(column, tail=rows.get(name, missing))
    for table, rows in tails.items():
        for name, tail in rows.items():
            variable = layout.variable(table, name)
            if variable is not None and name != TABLES[table].dim and (table, name) not in in_file:
                num = base.num_rows(table)
                yield Deferred(f"/{TABLES[table].group}", False, table, variable, num, tail=tail)
