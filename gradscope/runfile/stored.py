"""Columns that stay on the disk until they are asked for: the run file's rows, and behind them the journals'.

The file may grow meanwhile but not have been resumed, which moves rows away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import BackendArray
from xarray.core import indexing

from gradscope.errors import RunFileError
from gradscope.runfile.batch import empty_column
from gradscope.runfile.check import unreadable
from gradscope.runfile.layout import Layout
from gradscope.runfile.load import Loaded, open_unlocked
from gradscope.runfile.reading import Deferred

_FEW = 64
"""Up to so many rows are fetched one by one, more as one stretch."""


@dataclass(frozen=True)
class Source:
    """A run file, and by what it is known to be the one that was read, or longer: its run and its segments.

    It is opened for each reading and not kept open, which would keep other tools of the process off it.
    """

    path: Path
    run_id: str
    num_segments: int

    @classmethod
    def of(cls, loaded: Loaded) -> Source:
        """Returns the source of a run that was read."""
        content = loaded.content
        return cls(
            loaded.paths.file.absolute(),
            str(content.attributes.get("run_id")),
            content.num_rows("segments"),
        )

    @contextmanager
    def opened(self) -> Iterator[h5py.File]:
        """Opens the file.

        Raises:
            RunFileError: It is gone, or not what it was.
        """
        try:
            file = open_unlocked(self.path)
        except OSError as error:
            raise unreadable(self.path, error) from error
        with file:
            num = len(file["segments/segment"]) if "segments" in file else 0
            if (str(file.attrs.get("run_id")), num) != (self.run_id, self.num_segments):
                raise RunFileError(
                    f"{self.path}: was resumed or replaced after it was opened, so what had not been read is "
                    "gone. Open the run again."
                )
            yield file


class StoredColumn(BackendArray):
    """A column of a run as xarray reads it piece by piece.

    Args:
        column: Where it stands.
        layout: Of the run; labels that the file does not have yet are missing in its rows.
        source: The file.
    """

    def __init__(self, column: Deferred, layout: Layout, source: Source) -> None:
        num_tail = 0 if column.tail is None else len(column.tail)
        self.shape = (column.num_stored + num_tail, *layout.shape(column.variable))
        self._column = column
        self._layout = layout
        self._source = source
        self.dtype = np.dtype(self._decoded(empty_column(column.variable, 0, layout)).dtype)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> NDArray[Any]:
        rows = np.arange(self.shape[0])[key[0]]
        values = self._decoded(self._rows(np.atleast_1d(rows)))
        single = [np.ndim(rows) == 0, *(isinstance(own, int | np.integer) for own in key[1:])]
        for axis, own in enumerate(key[1:], 1):
            if not single[axis]:
                values = np.take(values, np.arange(values.shape[axis])[own], axis)
        last = (0, *key[1:])
        scalars: Any = tuple(
            last[axis] if is_single else slice(None) for axis, is_single in enumerate(single)
        )
        return values[scalars]

    def _rows(self, rows: NDArray[np.intp]) -> NDArray[Any]:
        num = self._column.num_stored
        values = empty_column(self._column.variable, len(rows), self._layout)
        stored = rows < num
        if self._column.in_file and stored.any():
            # The file may have more labels by now than it had, and has fewer than the journals.
            labels = tuple(slice(length) for length in self._column.shape)
            place: Any = (stored, *labels)
            values[place] = self._fetched(rows[stored])[(slice(None), *labels)]
        if self._column.tail is not None:
            values[~stored] = self._column.tail[rows[~stored] - num]
        return values

    def _fetched(self, rows: NDArray[np.intp]) -> NDArray[Any]:
        with self._source.opened() as file:
            dataset = file[f"{self._column.group}/{self._column.variable.name}"]
            if self._column.variable.dtype == "str":
                dataset = dataset.asstr()
            if len(rows) <= _FEW:
                return np.stack([dataset[row] for row in rows.tolist()])
            first = int(rows.min())
            return dataset[first : int(rows.max()) + 1][rows - first]

    def _decoded(self, values: NDArray[Any]) -> NDArray[Any]:
        return decoded(values, self._column.variable.fill, is_required=self._column.variable.required)


def decoded(values: NDArray[Any], fill: Any, *, is_required: bool) -> NDArray[Any]:
    """Returns stored values as people read them: NaN for missing whole numbers."""
    if values.dtype.kind == "i" and not is_required:
        return np.where(values == fill, np.nan, values)
    return values


def lazy_variable(column: Deferred, layout: Layout, source: Source) -> xr.Variable:
    """Returns a column that is read when its values are asked for, and then kept."""
    lazy: Any = indexing.LazilyIndexedArray(StoredColumn(column, layout, source))
    cached: Any = indexing.MemoryCachedArray(indexing.CopyOnWriteArray(lazy))
    attributes = {"units": column.variable.units, "long_name": column.variable.long_name}
    return xr.Variable(column.variable.dims, cached, attributes, fastpath=True)
