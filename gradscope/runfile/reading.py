"""Reads a run file's layout and tables, checked against the schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import h5py

from gradscope.runfile.batch import Batch, Column, Columns
from gradscope.runfile.check import check_distinct, check_names, checked_dataset, read_dataset, read_group
from gradscope.runfile.layout import Layout
from gradscope.schema import LABELS, ROOT_VARIABLES, TABLES, USER_TABLES, Table, Variable

_ALWAYS = ("role", "slot", "policy")
"""Labels that every run has."""
_OWNERS = {"slot_role": "role", "slot_policy": "policy"}
"""Root variables that say what a slot belongs to, and where its name stands."""
_SKETCHES = Variable("sketch_dim", ("sketch_dim",), "i8", "1", "")

Lazy = Callable[[str, Variable], bool]
"""Whether a variable of a table is to be left on the disk."""


@dataclass(frozen=True)
class Deferred:
    """A column that was left on the disk.

    Attributes:
        group: Its group in the tree.
        in_file: Whether the file has it; otherwise all of it is in journals.
        table: Name of its table.
        variable: What the schema says of it.
        num_stored: Rows that the file's table has.
        shape: Shape of one of its rows in the file.
        tail: The rows behind these, from journals; None when there are none.
    """

    group: str
    in_file: bool
    table: str
    variable: Variable
    num_stored: int
    shape: tuple[int, ...] = ()
    tail: Column | None = None


def nothing(table: str, variable: Variable) -> bool:
    """Leaves no variable on the disk."""
    return False


def read_tables(file: h5py.Group, layout: Layout, lazy: Lazy = nothing) -> Batch:
    """Reads every table of the schema, and of the layout's own variables, found in a group.

    Args:
        file: The file, or the group of a superseded segment.
        layout: Of the run.
        lazy: Says which variables are left out.

    Raises:
        RunFileError: A variable is absent that every row has, or one does not fit the schema.
    """
    batch: Batch = {}
    for table in TABLES.values():
        group = read_group(file, table.group)
        # Two tables are at home in /user; either may be absent.
        if group is not None and (table.dim in group or table.name not in USER_TABLES):
            batch[table.name] = _read_table(group, table, layout, lazy)
    return batch


def deferred_columns(file: h5py.Group, layout: Layout, batch: Batch, lazy: Lazy) -> list[Deferred]:
    """Returns the columns that `read_tables` left out of a batch.

    Raises:
        RunFileError: One does not fit the schema.
    """
    found = []
    for name, columns in batch.items():
        group = read_group(file, TABLES[name].group)
        if group is None:
            continue
        num = len(columns[TABLES[name].dim])
        for variable in _variables(group, TABLES[name], layout):
            if lazy(name, variable):
                shape = layout.shape(variable)
                checked_dataset(group, variable, (num, *shape))
                found.append(Deferred(str(group.name), True, name, variable, num, shape))
    return found


def _variables(group: h5py.Group, table: Table, layout: Layout) -> list[Variable]:
    """Returns the table's coordinate, what every row has, and what else the group holds of the schema."""
    present = (layout.variable(table.name, name) for name in group)
    required = (variable for variable in table.variables if variable.required)
    return list(dict.fromkeys([*required, *(variable for variable in present if variable is not None)]))


def _read_table(group: h5py.Group, table: Table, layout: Layout, lazy: Lazy) -> Columns:
    num: int | None = None
    columns: Columns = {}
    for variable in _variables(group, table, layout):
        if lazy(table.name, variable):
            continue
        # The first is the table's coordinate, which says how many rows there are.
        columns[variable.name] = read_dataset(group, variable, (num, *layout.shape(variable)))
        num = len(columns[table.dim])
    return columns


def read_layout(file: h5py.File) -> Layout:
    """Reads the labels and the user variables of a file.

    Raises:
        RunFileError: Labels, or the slots' roles and policies, are absent or do not fit the schema.
    """
    labels = {dim: _labels(file, dim) for dim in LABELS}
    owners = [variable for variable in ROOT_VARIABLES if variable.name in _OWNERS]
    names: dict[str, tuple[str, ...]] = {}
    for variable in owners:
        found = read_dataset(file, variable, (len(labels["slot"]),))
        names[variable.name] = tuple(found.tolist())
        check_names(
            file, variable.name, names[variable.name], labels[_OWNERS[variable.name]], _OWNERS[variable.name]
        )
    sketches = read_dataset(file, _SKETCHES, (None,)) if "sketch_dim" in file else ()
    layout = Layout(labels, names["slot_role"], names["slot_policy"], sketch_dim=len(sketches))
    user = {name: tuple(_user_variables(file, TABLES[name], layout)) for name in USER_TABLES}
    return replace(layout, user=user)


def _labels(file: h5py.File, dim: str) -> tuple[str, ...]:
    if dim not in file and dim not in _ALWAYS:
        return ()
    variable = Variable(dim, (dim,), "str", "", "")
    labels = tuple(read_dataset(file, variable, (None,)).tolist())
    check_distinct(file, dim, labels)
    return labels


def _user_variables(file: h5py.File, table: Table, layout: Layout) -> Iterator[Variable]:
    """Yields the caller's own variables, those whose dims are known; others are no variables of ours."""
    group = read_group(file, table.group)
    if group is None:
        return
    # A scale is known by its place in the file: HDF5 searches the whole file for the name of one.
    scales_of = {**{dim: file.get(dim) for dim in layout.coordinates()}, table.dim: group.get(table.dim)}
    known = {scale.id: dim for dim, scale in scales_of.items() if scale is not None}
    for name, dataset in group.items():
        if name in (TABLES[user].dim for user in USER_TABLES) or not isinstance(dataset, h5py.Dataset):
            continue
        dims = tuple(known.get(scales[0].id, "") for scales in dataset.dims if len(scales))
        if not dims or dims[0] != table.dim or "" in dims or len(dims) != dataset.ndim:
            continue
        dtype = "str" if h5py.check_string_dtype(dataset.dtype) else dataset.dtype.str[1:]
        units, long_name = (str(dataset.attrs.get(label, "")) for label in ("units", "long_name"))
        yield Variable(name, dims, dtype, units, long_name)
