"""The spellings that small trainers have in common: slime, prime-rl, and the names of our own schema."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect
from gradscope.schema import TABLES

ROLE = "(?:(?P<role>[^/]+)/)?"


def dialect() -> Dialect:
    """Plain spellings: loss, reward, [ROLE/]grad_norm, train/..., optim/..., names of the run file."""
    update = [v.name for v in TABLES["updates"].variables if v.dims == ("update",) and v.dtype == "f8"]
    train = [v.name for v in TABLES["train"].variables if v.dtype == "f8" and "phase" not in v.dims]
    slots = {v.name for v in TABLES["train"].variables if "slot" in v.dims}
    names = {name: name for name in (*train, *update)} | {
        "reward": "reward_mean",
        "lr": "learning_rate",
        "kl": "kl_reference",
        "num_correct": "num_correct",
        "num_total": "num_total",
    }
    by_role = slots | {"grad_norm", "reward", "learning_rate"}
    return Dialect(
        rules={
            f"(?:(?:train|optim)/)?{ROLE if key in by_role else ''}{key}": metric
            for key, metric in names.items()
        }
    )
