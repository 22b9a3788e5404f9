"""Reads a foreign log: finds its format and dialect, and gives every number its meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradscope.errors import ConfigError, DataError
from gradscope.importers import IMPORTERS
from gradscope.importers.dialect import Dialect
from gradscope.importers.dialects import DIALECTS
from gradscope.importers.log import ForeignLog, Importer, Settings
from gradscope.importers.long_table import Entry, entries, free_names, without_rivals
from gradscope.importers.mapping import MappingFile, read_mapping
from gradscope.importers.order import in_order
from gradscope.importers.recognising import format_of
from gradscope.importers.roster import Roster, roster
from gradscope.importers.scores import Score, Totals, scores_of, totals_of
from gradscope.importers.segments import Reader, Segment, split, with_steps
from gradscope.importers.telling import limits_of, notes_of, renamed_note, said_limits
from gradscope.importers.wording import listed
from gradscope.runfile.columns import number

NO_NUMBERS = "none holds numbers"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user says about a log; None leaves it to be found out.

    Attributes:
        format: Name of an importer.
        dialect: Name of a dialect.
        mapping: A mapping file, in place of a dialect.
        role_pattern: Regular expression with a group `role`, looked for in every key.
        num_total: Problems of each evaluation that is logged as a fraction, or data set to their number.
        settings: For the importer.
    """

    format: str | None = None
    dialect: str | None = None
    mapping: str | Path | None = None
    role_pattern: str | None = None
    num_total: Totals = None
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.mapping is not None and self.dialect is not None:
            raise ConfigError(
                "a mapping file takes the place of a dialect. Give --mapping or --dialect, not both."
            )
        totals = self.num_total.values() if isinstance(self.num_total, Mapping) else [self.num_total]
        for total in totals:
            if total is not None and total < 1:
                raise ConfigError(f"--num-total is {total}, expected the number of evaluated problems.")


@dataclass(frozen=True)
class ReadLog:
    """A foreign log with every number's meaning.

    Attributes:
        source: Where it is from.
        format: Name of the importer that read it.
        dialect: Name of the dialect, or of the mapping file.
        segments: Stretches between resumes.
        entries: The long table: segment, step, role, metric, value, source key.
        scores: The evaluations of each segment.
        roster: Slots, roles, policies.
        names: Key to the name under which it is kept where it has no place.
        unknown: Keys that nobody knows, which are kept by their own names.
        notes: What may be misread, and what the import did.
        limits: What the source cannot answer.
    """

    source: str
    format: str
    dialect: str
    segments: Sequence[Segment]
    entries: Sequence[Entry]
    scores: Sequence[Sequence[Score]]
    roster: Roster
    names: Mapping[str, str]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    limits: tuple[str, ...]


def read_log(source: str | Path | Sequence[str | Path], choices: Choices) -> ReadLog:
    """Returns what a log holds; several sources are the parts of one run in their order.

    Raises:
        DataError: A source is absent, damaged, empty, without steps or of another format, or holds several
            runs.
        ConfigError: The mapping file or role pattern cannot be used.
        UnknownNameError: There is no such format or dialect.
    """
    sources = [str(source)] if isinstance(source, str | Path) else [str(part) for part in source]
    name, where = choices.format or format_of(sources[0]), ", ".join(sources)
    mapping = None if choices.mapping is None else read_mapping(choices.mapping)
    log = _read_parts(sources, IMPORTERS.get(name)(), choices, mapping)
    if mapping is not None:
        mapping.check_columns(log.names, where)
    rows, step_notes = with_steps(log, where)
    keys = _number_keys(log)
    spoken, dialect, read, people = _understood(log, keys, choices, mapping, where)
    ordered, order_notes = in_order(rows, read, where, is_table=log.is_table)
    segments = split(ordered, read, where)
    total = choices.num_total or (mapping.num_total if mapping else None)
    totals = totals_of(total, keys, read, where)
    scores = [scores_of(segment, read, totals=totals, source=where) for segment in segments]
    table = entries(segments, read)
    _need_anything(where, table, [score.counted for score in scores])
    fractions = tuple(dict.fromkeys(key for score in scores for key in score.fractions))
    starts = [segment.first_step for segment in segments if segment.steps]
    names, renamed = free_names(keys, read)
    told = [*_left_out(log, keys), *renamed_note(renamed), *(mapping.unused(keys) if mapping else ())]
    told += notes_of(dialect, keys, table, people, starts)
    limits = (*log.limits, *said_limits(log), *limits_of(dialect, table, people, fractions))
    return ReadLog(
        source=where,
        format=name,
        dialect=spoken,
        segments=segments,
        entries=table,
        scores=[score.counted for score in scores],
        roster=people,
        names=names,
        unknown=tuple(key for key in keys if not read(key).metric),
        notes=(*log.notes, *step_notes, *order_notes, *told),
        limits=tuple(dict.fromkeys(limits)),
    )


def _read_parts(
    sources: Sequence[str], importer: Importer, choices: Choices, mapping: MappingFile | None
) -> ForeignLog:
    """Returns the parts of one run as one log."""
    settings = choices.settings
    if mapping is not None and settings.step is None:
        settings = replace(settings, step=mapping.step)
    logs = [importer.read(part, settings) for part in sources]
    return replace(
        logs[0],
        rows=tuple(row for part in logs for row in part.rows),
        notes=tuple(dict.fromkeys(note for part in logs for note in part.notes)),
        columns=tuple(dict.fromkeys(name for part in logs for name in part.columns)),
        is_table=len(logs) == 1 and logs[0].is_table,  # parts stand in the order that the user gave
    )


def _understood(
    log: ForeignLog, keys: Sequence[str], choices: Choices, mapping: MappingFile | None, source: str
) -> tuple[str, Dialect, Reader, Roster]:
    """Returns the dialect's name, the dialect, what each key means, and who takes part."""
    spoken, dialect = _spoken(log, keys, choices, mapping, source)
    read = without_rivals(dialect.reader(choices.role_pattern), keys, lambda meaning: meaning.place)
    people = roster([read(key) for key in keys], dialect, log, source)
    if mapping is not None:
        mapping.check_places(keys, read, people)
    return spoken, dialect, without_rivals(read, keys, people.place), people


def _spoken(
    log: ForeignLog, keys: Sequence[str], choices: Choices, mapping: MappingFile | None, source: str
) -> tuple[str, Dialect]:
    """Returns the name of the dialect of a log, and the dialect.

    Raises:
        DataError: It knows none of the keys.
    """
    if mapping is not None:
        name, dialect = Path(str(choices.mapping)).name, mapping.dialect
    else:
        name = choices.dialect or log.dialect or _dialect_of(keys, source, choices.role_pattern)
        dialect = DIALECTS.get(name)()
    read = dialect.reader(choices.role_pattern)
    if not any(read(key).metric for key in keys):
        raise DataError(
            f"{source}: dialect '{name}' knows none of its keys ({listed(keys, none=NO_NUMBERS)}). "
            "Say what they mean with --mapping FILE.yaml."
        )
    return name, dialect


def _dialect_of(keys: Sequence[str], source: str, role_pattern: str | None) -> str:
    """Returns the dialect that knows most keys, the first of several."""
    known = {}
    for name in DIALECTS.names():
        dialect: Dialect = DIALECTS.get(name)()
        read = dialect.reader(role_pattern)
        known[name] = sum(bool(read(key).metric) for key in keys)
    best = max(known, key=lambda name: known[name])
    if not known[best]:
        raise DataError(
            f"{source}: no dialect knows any of its keys ({listed(keys, none=NO_NUMBERS)}). Say what they "
            "mean with --mapping FILE.yaml; see docs/importing.md."
        )
    return best


def _number_keys(log: ForeignLog) -> list[str]:
    """Returns the keys that hold a number in some row, in the order of their first."""
    return list(
        dict.fromkeys(
            key for row in log.rows for key, value in row.values.items() if number(value) is not None
        )
    )


def _left_out(log: ForeignLog, keys: Sequence[str]) -> list[str]:
    """Says so where keys never hold a number, as those of tables and texts."""
    known = set(keys)
    mixed = {
        key: None
        for row in log.rows
        for key, value in row.values.items()
        if key in known and number(value) is None and value is not None
    }
    texts = [f"{len(mixed)} key(s) hold text between numbers, which is left out ({listed([*mixed])})."]
    others = [key for key in dict.fromkeys(key for row in log.rows for key in row.values) if key not in known]
    if not others:
        return texts if mixed else []
    return [
        *(texts if mixed else []),
        f"{len(others)} key(s) hold no numbers and are left out ({listed(others)}).",
    ]


def _need_anything(source: str, table: Sequence[Entry], scores: Sequence[Sequence[Score]]) -> None:
    if not table and not any(scores):
        raise DataError(
            f"{source}: its evaluations are fractions of an unknown number of answers. Say the number of "
            "problems with --num-total."
        )
