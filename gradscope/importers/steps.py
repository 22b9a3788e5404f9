"""What an imported training step hands to the run file: records of its updates, and metrics by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradscope.importers.long_table import Entry
from gradscope.importers.roster import Roster
from gradscope.runfile import UpdateRecord
from gradscope.schema import TABLES, Variable

SCALAR, BY_SLOT, BETWEEN_SLOTS = ("update",), ("update", "slot"), ("update", "slot", "slot_b")


@dataclass
class _Update:
    """What is known of one update while its step is read."""

    scalars: dict[str, float] = field(default_factory=dict)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    products: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        records: Its updates.
        metrics: As `RunWriter.append` takes them; keys that nobody knows are among them by their own name.
    """

    records: tuple[UpdateRecord, ...]
    metrics: dict[str, Any]


def step_of(entries: Iterable[Entry], roster: Roster, names: Mapping[str, str], *, wall_time: float) -> Step:
    """Returns one step of the run file.

    The Gram of an update has on its diagonal what the log tells: the square of the policy's norm where the
    policy has one slot, so that the norm is that slot's. All else of it is missing.
    """
    # What the log does not say is missing, not the present time nor the number of records handed over.
    metrics: dict[str, Any] = {"wall_time": wall_time, "num_updates": math.nan}
    updates: dict[tuple[str, str], _Update] = {}
    for entry in entries:
        if not (_to_update(entry, roster, updates) or _to_train(entry, roster, metrics)):
            metrics[names[entry.source_key]] = entry.value
    if "episode_reward_mean" not in metrics and len(roster.slots) == 1 and "reward_mean" in metrics:
        metrics["episode_reward_mean"] = next(iter(metrics["reward_mean"].values()))
    records = tuple(_record(policy, update, roster) for (policy, _), update in updates.items())
    return Step(records, metrics)


def _to_update(entry: Entry, roster: Roster, updates: dict[tuple[str, str], _Update]) -> bool:
    """Puts an entry about an update where it belongs; says whether it is one."""
    variable = TABLES["updates"].variable(entry.metric)
    labels = entry.meaning.labels
    if variable is None or (TABLES["train"].variable(entry.metric) and "policy" not in labels):
        return False
    policy = roster.policy_of(entry.meaning)
    if policy is None:
        return False
    update = updates.setdefault((policy, labels.get("minibatch", "")), _Update())
    if variable.dims == SCALAR:
        update.scalars[entry.metric] = entry.value
    elif variable.dims == BY_SLOT:
        update.counts.setdefault(entry.metric, {})[labels["slot"]] = entry.value
    else:
        update.products.setdefault(entry.metric, {})[labels["slot"], labels["slot_b"]] = entry.value
    return True


def _to_train(entry: Entry, roster: Roster, metrics: dict[str, Any]) -> bool:
    """Puts an entry of `/train` where it belongs; says whether it is one and has a place."""
    variable = TABLES["train"].variable(entry.metric)
    if variable is None:
        return False
    label = _label(entry, variable, roster)
    if label is None:
        return False
    if label:
        metrics.setdefault(entry.metric, {})[label] = entry.value
    else:
        metrics[entry.metric] = entry.value
    return True


def _label(entry: Entry, variable: Variable, roster: Roster) -> str | None:
    """Returns the slot or phase of an entry, nothing for one of the whole step, None where it is open."""
    if "slot" in variable.dims:
        return roster.slot_of(entry.meaning)
    if "phase" in variable.dims:
        return entry.meaning.labels.get("phase", "step")
    return None if entry.role else ""


def _record(policy: str, update: _Update, roster: Roster) -> UpdateRecord:
    slots = roster.slots_on(policy)
    products = {name: _matrix(values, slots) for name, values in update.products.items()}
    gram = products.get("gram", np.full((len(slots), len(slots)), np.nan))
    norm = update.scalars.get("grad_norm", math.nan)
    square = norm * norm
    if "gram" not in products and len(slots) == 1 and math.isfinite(square):
        gram = np.array([[square]])
    return UpdateRecord(
        policy=policy,
        slots=slots,
        gram=gram,
        counts={
            name: np.array([values.get(slot, np.nan) for slot in slots])
            for name, values in update.counts.items()
        },
        scalars=dict(update.scalars),
        gram_cross=products.get("gram_cross"),
    )


def _matrix(values: dict[tuple[str, str], float], slots: tuple[str, ...]) -> np.ndarray:
    """Returns products as a symmetric matrix over the slots, from either half."""
    return np.array(
        [[values.get((row, column), values.get((column, row), np.nan)) for column in slots] for row in slots]
    )
