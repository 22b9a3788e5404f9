"""TRL and the Hugging Face Trainer: `trainer_state.json`, also inside a checkpoint folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.json_lines import NOT_JSON
from gradscope.importers.log import ForeignLog, Row, Settings, existing, refuse_options

FILE = "trainer_state.json"


class Importer:
    """TRL or Hugging Face Trainer: trainer_state.json, or the folder (or latest checkpoint) that holds it."""

    def recognises(self, source: str) -> bool:
        """Returns whether there is a trainer_state.json."""
        return _find(Path(source)) is not None

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns the entries of `log_history`.

        Raises:
            DataError: There is none, or it is empty; or options are given that it does not know.
        """
        path = _find(existing(source, FILE))
        refuse_options(source, "a Trainer's state", settings, "step", "where")
        if path is None:
            raise DataError(f"{source}: holds no {FILE}, nor does a checkpoint-* folder in it.")
        history = _history(path)
        rows = []
        for number, entry in enumerate(history):
            step = entry.get("step")
            if not isinstance(step, int | float) or not math.isfinite(step):
                raise DataError(f"{path}: log_history[{number}] has no 'step'. Is it a Trainer's own state?")
            rows.append(Row(step, {key: value for key, value in entry.items() if key != "step"}))
        return ForeignLog(tuple(rows), dialect="trl")


def _find(path: Path) -> Path | None:
    """Returns the state file meant by a path: itself, in the folder, or in its latest checkpoint."""
    if path.is_file():
        return path if path.name.endswith(FILE) else None
    if (path / FILE).is_file():
        return path / FILE
    checkpoints = [folder for folder in path.glob("checkpoint-*") if (folder / FILE).is_file()]
    numbered = [(int(folder.name[11:]), folder) for folder in checkpoints if folder.name[11:].isdigit()]
    return max(numbered)[1] / FILE if numbered else None


def _history(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise DataError(f"{path}: not readable as JSON ({error}). Take the state of a checkpoint.") from error
    history = content.get("log_history") if isinstance(content, dict) else None
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise DataError(f"{path}: has no list 'log_history'. Expected a Trainer's {FILE}.")
    if not history:
        raise DataError(f"{path}: log_history is empty, there is nothing to import.")
    return history
