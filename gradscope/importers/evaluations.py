"""Files of evaluations alone: the reference study's `eval_results.jsonl`, or one JSON object of lists."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.json_lines import first_object, read_objects, whole_object
from gradscope.importers.log import (
    ForeignLog,
    Row,
    Settings,
    existing,
    no_rows,
    refuse_mixture,
    refuse_options,
)

STEPS = ("checkpoint_step", "step")
COUNTS = ("num_correct", "num_total")
RUNS = ("workflow_type", "share_policy", "run", "experiment_name")
"""Keys that tell runs apart in one file."""
LIMITS = ("anything about gradients, rewards or replies: the source holds evaluations only",)


class Importer:
    """Evaluations alone: the reference study's eval_results.jsonl, or JSON with lists of steps and counts."""

    def recognises(self, source: str) -> bool:
        """Returns whether the file has steps and counts."""
        path = Path(source)
        if not path.is_file() or path.suffix not in {".json", ".jsonl"}:
            return False
        first = first_object(path) or whole_object(path)
        return all(name in first for name in COUNTS) and any(name in first for name in STEPS)

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns one row an evaluation, in the order of the file.

        Raises:
            DataError: Steps or counts are missing, or the file holds several runs.
        """
        path = existing(source, "a file of evaluations")
        refuse_options(source, "files of evaluations", settings, "step")
        whole = whole_object(path)
        is_lists = isinstance(whole.get("num_correct"), list)
        table, torn = (_from_lists(path, whole), ()) if is_lists else read_objects(path)
        chosen = [row for row in table if settings.matches(row)]
        if not chosen:
            raise no_rows(str(path), settings, what="evaluation")
        runs = {key: {str(row[key]) for row in chosen if key in row} for key in RUNS}
        refuse_mixture(str(path), runs, settings)
        rows = tuple(_row(path, number, row) for number, row in enumerate(chosen, 1))
        return ForeignLog(rows, dialect="evaluations", limits=LIMITS, notes=torn)


def _row(path: Path, number: int, row: dict[str, Any]) -> Row:
    step = next((row[name] for name in STEPS if name in row), None)
    if not isinstance(step, int | float) or not math.isfinite(step):
        raise DataError(f"{path}, evaluation {number}: no step ({' or '.join(STEPS)}).")
    for name in COUNTS:
        if not isinstance(row.get(name), int | float):
            raise DataError(
                f"{path}, evaluation {number}: no '{name}'; accuracy alone does not say how sure."
            )
    return Row(step, {name: row[name] for name in (*COUNTS, "temperature") if name in row})


def _from_lists(path: Path, whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows of an object whose values are lists of one length; a num_total may be one for all."""
    if isinstance(whole.get("num_total"), int | float):
        whole = {**whole, "num_total": [whole["num_total"]] * len(whole["num_correct"])}
    names = [name for name in (*STEPS, *COUNTS) if isinstance(whole.get(name), list)]
    lengths = {name: len(whole[name]) for name in names}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{path}: lists of different lengths, {lengths}.")
    columns = [whole[name] for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
