"""A foreign log as importers hand it over: rows of keys and values, before anybody says what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gradscope.errors import DataError
from gradscope.importers.wording import listed, plain


@dataclass(frozen=True)
class Row:
    """One row of a log.

    Attributes:
        counter: The number that the source gave the row; NaN where it gave none.
        values: Key to what was logged.
        wall_time: Seconds since 1970-01-01, UTC; NaN where unknown.
    """

    counter: float
    values: Mapping[str, Any]
    wall_time: float = math.nan


@dataclass(frozen=True)
class ForeignLog:
    """What one source holds.

    Attributes:
        rows: In the order in which they were written.
        counter_is_step: Whether the rows' counter is the training step. Where it only counts rows, the step
            is looked for among the logged keys.
        dialect: The dialect that the format implies; empty where only the keys can tell.
        limits: What a log of this format cannot answer.
        notes: What a reader of the import should know, one sentence each.
        about: What the source says of the run; of it, `slots` (slot to role), `policies` (slot to policy) and
            `limits` (what the source of an imported run could not answer) are taken, which our own exports
            write.
        is_table: Whether its rows may stand in any order, as those of a table that was sorted.
        columns: Names of a table's columns, those without any value too; empty where only keys are known.
    """

    rows: tuple[Row, ...]
    counter_is_step: bool = True
    dialect: str = ""
    limits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    is_table: bool = False
    columns: tuple[str, ...] = ()

    def said(self, name: str) -> dict[str, str]:
        """Returns one of the maps in `about`; empty where the source does not say it."""
        value = self.about.get(name)
        return {str(key): str(own) for key, own in value.items()} if isinstance(value, Mapping) else {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that may stand in a row."""
        return tuple(dict.fromkeys((*self.columns, *(key for row in self.rows for key in row.values))))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an importer is told besides the source.

    Attributes:
        where: Column to value: rows that differ are left out, where one source holds several runs.
        step: Key that holds the training step; None leaves the choice to the importer.
        client: For sources behind a service, the object that is asked, such as `wandb.Api()`.
    """

    where: Mapping[str, str] = field(default_factory=dict)
    step: str | None = None
    client: Any = None

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Returns whether a row is among those asked for."""
        return all(_is(values.get(column, ""), wanted) for column, wanted in self.where.items())


class Importer(Protocol):
    """Reads one format."""

    def recognises(self, source: str) -> bool:
        """Returns whether the source looks like this format; never raises for its content."""

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns what the source holds.

        Raises:
            DataError: It is absent, damaged, empty or of another format.
        """


def _is(value: Any, wanted: str) -> bool:
    """Returns whether a value is the wanted one: as text, number, or true or false in any case."""
    text = str(value)
    if text == wanted or {text.lower(), wanted.lower()} in ({"true"}, {"false"}):
        return True
    if isinstance(value, bool):
        return False
    try:
        return float(text) == float(wanted)
    except ValueError:
        return False


def shown(value: Any) -> str:
    """Returns a value as --where takes it: whole numbers without a fraction."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def existing(source: str, what: str) -> Path:
    """Returns the path of a source.

    Raises:
        DataError: Nothing is there.
    """
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such file or directory. Expected {what}.")
    return path


def refuse_options(source: str, form: str, settings: Settings, *names: str) -> None:
    """Refuses options that a format has no use for.

    Args:
        source: Where the rows are from.
        form: The format, as it ends a sentence.
        settings: As given.
        names: Those that it does not know, of `step` and `where`.

    Raises:
        DataError: One is given.
    """
    for name in names:
        if getattr(settings, name):
            own = " (or 'step:' in the mapping file)" if name == "step" else ""
            raise DataError(f"{source}: --{name}{own} means nothing for {form}; leave it out.")


def no_rows(source: str, settings: Settings, *, what: str = "row") -> DataError:
    """Returns the error of a source of which nothing is left once rows were chosen."""
    wanted = ", ".join(f"{column}={value}" for column, value in settings.where.items())
    chosen = f" matches --where {wanted}" if wanted else ""
    return DataError(f"{source}: no {what}{chosen}, there is nothing to import.")


def refuse_mixture(source: str, runs: Mapping[str, set[str]], settings: Settings) -> None:
    """Refuses a source in which a column that names the run has several values.

    Args:
        source: Where the rows are from.
        runs: Column to the values in the rows that match `settings.where`.
        settings: As given.

    Raises:
        DataError: A column has more than one value.
    """
    for column, values in runs.items():
        if len(values) > 1:
            raise DataError(
                f"{source}: holds {len(values)} runs by '{column}' ({listed(sorted(values))}). "
                f"Choose one with --where {column}={plain(min(values))}."
            )
