"""Plug-in tables: a name leads to a `module:attribute` that is imported only when asked for.

A table is one dictionary in the `__init__` of the folder that holds the plug-ins. Names from elsewhere work
too: a `module:attribute` where a name is expected, or an entry point in the group `gradscope.{kind}s`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from gradscope.errors import UnknownNameError, unknown_name


class Registry:
    """A read-only table of plug-ins of one kind.

    Args:
        kind: What is registered, singular, as used in messages and in the entry-point group.
        table: Name to `module:attribute`; the name equals the file's name.
    """

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind = kind
        self._table = dict(table)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def names(self) -> list[str]:
        """Returns the built-in names in their order, then those of entry points."""
        return [*self._table, *(name for name in self._entry_points() if name not in self._table)]

    def get(self, name: str) -> Any:
        """Returns the plug-in called `name`, importing its module.

        Raises:
            UnknownNameError: No plug-in has that name, or the `module:attribute` does not exist.
        """
        if name in self._table:
            return self._load(self._table[name])
        if ":" in name:
            return self._load(name)
        outside = self._entry_points()
        if name in outside:
            return self._load(outside[name])
        raise unknown_name(self.kind, name, self.names())

    def describe(self) -> dict[str, str]:
        """Returns each name with the first line of its plug-in's docstring."""
        return {name: (self.get(name).__doc__ or "").strip().split("\n")[0] for name in self.names()}

    def target(self, name: str) -> str:
        """Returns the `module:attribute` behind a built-in name."""
        return self._table[name]

    def _entry_points(self) -> dict[str, str]:
        return {point.name: point.value for point in entry_points(group=f"gradscope.{self.kind}s")}

    def _load(self, target: str) -> Any:
        module_name, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            raise UnknownNameError(
                f"{self.kind} '{target}': there is no module '{error.name}' on the Python path. "
                f"Write module:attribute, or one of: {', '.join(self.names())}."
            ) from error
        except AttributeError as error:
            raise UnknownNameError(
                f"{self.kind} '{target}': module '{module_name}' has no attribute '{attribute}'."
            ) from error
