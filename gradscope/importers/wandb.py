"""Weights & Biases: the whole history of a run, asked from its service."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.log import ForeignLog, Row, Settings, refuse_options

RUN = re.compile(r"[\w.-]+/[\w.-]+/(?:runs/)?[\w.-]+")
NOTE = "W&B's own _step counts log calls: the training step is taken from a logged key, if any."


class Importer:
    """Weights & Biases run ENTITY/PROJECT/RUN_ID by scan_history; for exports see csv and parquet."""

    def recognises(self, source: str) -> bool:
        """Returns whether it is a run's path with `wandb:` before it, or an offline `.wandb` file."""
        return source.startswith("wandb:") or source.endswith(".wandb")

    def read(self, source: str, settings: Settings) -> ForeignLog:
        """Returns every row of the history.

        Raises:
            DataError: It names no run, the service cannot be asked, or the history is empty.
        """
        if source.endswith(".wandb") or Path(source).exists():
            raise DataError(
                f"{source}: an offline file of W&B's, which its own library cannot read either. Run "
                "'wandb sync' and import wandb:ENTITY/PROJECT/RUN_ID, or export the history as parquet."
            )
        refuse_options(source, "a run of W&B's", settings, "step", "where")
        name = source.removeprefix("wandb:")
        if not RUN.fullmatch(name):
            raise DataError(f"{source}: expected wandb:ENTITY/PROJECT/RUN_ID.")
        rows, config = _history(name, settings.client or _client(name))
        if not rows:
            raise DataError(
                f"{source}: the history is empty. W&B may show none of an active run; export it as parquet."
            )
        return ForeignLog(tuple(rows), counter_is_step=False, notes=(NOTE,), about=config)


def _client(name: str) -> Any:
    import wandb

    try:
        return wandb.Api()
    except wandb.errors.Error as error:
        raise DataError(f"{name}: W&B cannot be asked ({_line(error)}). Run 'wandb login'.") from error


def _history(name: str, client: Any) -> tuple[list[Row], Mapping[str, Any]]:
    """Returns the rows and the configuration.

    Without `keys`, which would drop every row that lacks one of them; `history()` would sample 500 rows.
    """
    try:
        run = client.run(name)
        rows = [_row(values) for values in run.scan_history()]
    except Exception as error:  # the client has errors of its own and those of its transport
        raise DataError(f"wandb:{name}: W&B gave no history ({_line(error)}).") from error
    config = getattr(run, "config", {})
    return rows, config if isinstance(config, Mapping) else {}


def _row(values: Mapping[str, Any]) -> Row:
    kept = {key: value for key, value in values.items() if not key.startswith("_") and value is not None}
    counter, time = values.get("_step"), values.get("_timestamp")
    return Row(
        float(counter) if isinstance(counter, int | float) else math.nan,
        kept,
        float(time) if isinstance(time, int | float) else math.nan,
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
