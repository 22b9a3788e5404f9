"""Imports: a foreign log in, a run file out."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.importers.log import Settings
from gradscope.importers.long_table import Entry
from gradscope.importers.placing import placed_whole, refuse_existing
from gradscope.importers.reading import Choices, ReadLog, read_log
from gradscope.importers.scores import Score, Totals
from gradscope.importers.steps import step_of
from gradscope.runfile import RunWriter
from gradscope.runfile.intake import KEPT_AS_USER


@dataclass(frozen=True)
class Imported:
    """What an import made.

    Attributes:
        path: The run file or run directory.
        format: Name of the importer.
        dialect: Name of the dialect, or of the mapping file.
        num_steps: Training steps.
        num_evaluations: Evaluations with counts.
        num_segments: Stretches between resumes.
        roles: Roles.
        unknown: Keys that nobody knows; they are kept under /user.
        notes: What may be misread, and what was assumed.
        limits: What the source cannot answer.
    """

    path: Path
    format: str
    dialect: str
    num_steps: int
    num_evaluations: int
    num_segments: int
    roles: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    limits: tuple[str, ...]


def import_run(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    format: str | None = None,
    dialect: str | None = None,
    mapping: str | Path | None = None,
    role_pattern: str | None = None,
    num_total: Totals = None,
    step: str | None = None,
    where: Mapping[str, str] | None = None,
    client: Any = None,
) -> Imported:
    """Makes a run file of another tool's log, for `open_run`, `diagnose` and the figures.

    Args:
        source: File, folder or `wandb:ENTITY/PROJECT/RUN_ID`; several are the parts of one run, in order.
        out: A path ending in `.h5`, or a run directory; no run may be there.
        format: Name of an importer (`gradscope list importers`); found out when not given.
        dialect: Whose keys they are (`gradscope list dialects`); found out when not given.
        mapping: A YAML file that says what the keys mean, in place of a dialect.
        role_pattern: Regular expression with a group `role`, looked for in every key.
        num_total: Problems of each evaluation that is logged as a fraction; data set to number where there
            are several data sets.
        step: Key that holds the training step.
        where: Column to value, where one source holds several runs.
        client: What is asked for W&B's history, by default `wandb.Api()`.

    Raises:
        DataError: A source is absent, damaged, empty, without steps, of another format, or of several runs.
        ConfigError: The mapping file or the role pattern cannot be used.
        UnknownNameError: There is no such format, dialect or metric.
        RunFileError: A file that the run would write is there already, such as the source.
        SchemaError: A role is called as the run file calls something else.
    """
    choices = Choices(
        format=format,
        dialect=dialect,
        mapping=mapping,
        role_pattern=role_pattern,
        num_total=num_total,
        settings=Settings(where=where or {}, step=step, client=client),
    )
    refuse_existing(Path(out))
    log = read_log(source, choices)
    with placed_whole(Path(out)) as draft:
        _write(log, draft)
    # A later segment takes the place of what came from its first step on.
    starts = [segment.first_step for segment in log.segments[1:]]
    ends = [(segment, min(starts[place:], default=math.inf)) for place, segment in enumerate(log.segments)]
    return Imported(
        path=Path(out),
        format=log.format,
        dialect=log.dialect,
        num_steps=sum(step < end for segment, end in ends for step in segment.steps),
        num_evaluations=sum(
            score.step < end for scores, (_, end) in zip(log.scores, ends, strict=True) for score in scores
        ),
        num_segments=len(log.segments),
        roles=tuple(dict.fromkeys(log.roster.slots.values())),
        unknown=log.unknown,
        notes=log.notes,
        limits=log.limits,
    )


def _write(log: ReadLog, out: Path) -> None:
    """Writes the segments one after the other, each going on where the one before was left."""
    about = {
        "source": log.source,
        "format": log.format,
        "dialect": log.dialect,
        "limits": list(log.limits),
        "notes": list(log.notes),
    }
    table: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in log.entries:
        table[entry.segment, entry.step].append(entry)
    for number, segment in enumerate(log.segments):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f"(?s).*{KEPT_AS_USER}", UserWarning)
            with RunWriter(
                out,
                slots=log.roster.slots,
                policies=log.roster.policies,
                config={"import": about},
                resume_from_step=segment.first_step - 1 if number else None,
                hardware="not known: imported",
            ) as writer:
                for step in sorted(segment.steps):
                    time = segment.steps[step].wall_time
                    own = step_of(table[number, step], log.roster, log.names, wall_time=time)
                    writer.append(step, own.records, metrics=own.metrics)
                for score in log.scores[number]:
                    _append(writer, score)


def _append(writer: RunWriter, score: Score) -> None:
    writer.append_evaluation(
        score.step,
        num_correct=score.num_correct,
        num_total=score.num_total,
        dataset=score.dataset,
        temperature=score.temperature,
        greedy=score.greedy,
        role_accuracy=score.role_accuracy or None,
        role_tokens_mean=score.role_tokens_mean or None,
    )
