"""Series of evaluations as counts: alike ones together, by step, repeats merged; and how far they scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.errors import SchemaError
from gradscope.stats.arrays import real_array

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]

DISPERSION_PRIOR = 8.0
"""Pseudo-observations that pull the dispersion towards the binomial value of 1."""
DISPERSION_FLOOR = 0.3
"""A fixed test set shares its items, so evaluations may scatter less than binomial, but not without limit."""


@dataclass(frozen=True)
class Setting:
    """One way of evaluating; accuracies of different settings are never compared.

    Attributes:
        dataset: Name of the evaluated problems.
        greedy: Whether the most likely token was always taken; False too where nobody knows.
        temperature: Sampling temperature; None where greedy or unknown.
        is_known: Whether the run says how replies were sampled.
    """

    dataset: str
    greedy: bool
    temperature: float | None
    is_known: bool = True

    @property
    def sampling(self) -> str:
        """How replies were sampled, in words; empty where that is not known."""
        if not self.is_known:
            return ""
        if self.greedy:
            return "greedy"
        return "sampled" if self.temperature is None else f"sampled at T = {self.temperature:g}"

    def __str__(self) -> str:
        return f"{self.dataset}, {self.sampling}" if self.sampling else self.dataset


@dataclass(frozen=True)
class Evaluations:
    """Evaluations in order of step, one for each step.

    Attributes:
        correct: Right answers, `[T]`.
        total: Problems, `[T]`.
        step: Training step, `[T]`; the position where the caller gave none.
        source: Position of each evaluation's first row in the caller's arrays, `[T]`.
    """

    correct: Array
    total: Array
    step: Array
    source: NDArray[np.intp]

    @property
    def accuracy(self) -> Array:
        """Fraction of right answers, `[T]`."""
        return self.correct / self.total


def evaluation_series(run: xr.DataTree) -> dict[Setting, Evaluations]:
    """Returns the evaluations of a run that may be compared with one another: one series each setting.

    Settings stand in the order of their first evaluation; evaluations without counts are left out.

    Raises:
        SchemaError: A count or step is not usable.
    """
    if "eval" not in run.children or "num_correct" not in run["eval"] or "num_total" not in run["eval"]:
        return {}
    table = run["eval"].to_dataset()
    usable = ((table["num_correct"] >= 0) & (table["num_total"] > 0)).values
    groups: dict[Setting, list[int]] = {}
    for row in np.flatnonzero(usable).tolist():
        groups.setdefault(_setting(table.isel(evaluation=row)), []).append(row)
    columns = [table[name].values for name in ("num_correct", "num_total", "step")]
    return {way: order_evaluations(*(column[rows] for column in columns)) for way, rows in groups.items()}


def _setting(evaluation: xr.Dataset) -> Setting:
    known = {name: float(evaluation[name]) for name in ("greedy", "temperature") if name in evaluation}
    greedy, temperature = known.get("greedy") == 1, known.get("temperature", np.nan)
    dataset = str(evaluation["dataset"].item()) if "dataset" in evaluation else "unnamed"
    is_known = known.get("greedy", -1) >= 0 or bool(np.isfinite(temperature))
    return Setting(dataset, greedy, None if greedy or not np.isfinite(temperature) else temperature, is_known)


def order_evaluations(num_correct: ArrayLike, num_total: ArrayLike, step: ArrayLike | None) -> Evaluations:
    """Returns the evaluations by step; repeats at one step are merged.

    Rows that agree in step, correct and total are one evaluation written more than once. Rows that agree
    only in step are independent samples of it and are pooled: sum of correct, sum of total.

    Args:
        num_correct: `[E]`, whole numbers.
        num_total: `[E]`, or anything that broadcasts to it; whole numbers of at least 1.
        step: `[E]` in any order, or None when the rows already stand in order.

    Raises:
        SchemaError: Shapes do not fit, or a count or step is not usable.
    """
    correct, total = _checked_counts(num_correct, num_total)
    if step is None:
        places = np.arange(correct.size)
        return Evaluations(correct, total, places.astype(np.float64), places)
    steps = real_array(step, name="step")
    if steps.shape != correct.shape:
        raise SchemaError(f"step has shape {steps.shape}, num_correct {correct.shape}: give one step a row.")
    if not np.isfinite(steps).all():
        raise SchemaError(
            f"step[{int(np.argmin(np.isfinite(steps)))}] is not a finite number: drop that row."
        )
    rows = np.stack([steps, correct, total], axis=1)
    _, first = np.unique(rows, axis=0, return_index=True)
    kept = np.sort(first)
    unique_steps, group = np.unique(steps[kept], return_inverse=True)
    source = np.full(unique_steps.size, correct.size, dtype=np.intp)
    np.minimum.at(source, group, kept)
    return Evaluations(
        correct=np.bincount(group, weights=correct[kept]).astype(np.float64),
        total=np.bincount(group, weights=total[kept]).astype(np.float64),
        step=unique_steps,
        source=source,
    )


def dispersion(correct: Array, total: Array) -> Array:
    """Returns how much evaluations scatter beyond binomial sampling (1), over the last axis.

    From the median absolute deviation of the successive differences of the arcsine accuracies, so that a
    trend or one break does not count as scatter; shrunk towards 1 and bounded below.
    Checkpoints that jitter give more than 1, the shared items of a fixed test set less.

    Args:
        correct: `[..., T]`, T at least 2.
        total: `[T]`.
    """
    angles = np.arcsin(np.sqrt((correct + 0.375) / (total + 0.75)))
    variance = 1.0 / (4.0 * total + 2.0)
    differences = np.diff(angles, axis=-1) / np.sqrt(variance[1:] + variance[:-1])
    centre = np.median(differences, axis=-1, keepdims=True)
    scatter = (1.4826 * np.median(np.abs(differences - centre), axis=-1)) ** 2
    count = differences.shape[-1]
    return np.maximum(DISPERSION_FLOOR, (DISPERSION_PRIOR + count * scatter) / (DISPERSION_PRIOR + count))


def _checked_counts(num_correct: ArrayLike, num_total: ArrayLike) -> tuple[Array, Array]:
    """Returns both counts as `[E]`, or says which row cannot be a count."""
    correct, total = real_array(num_correct, name="num_correct"), real_array(num_total, name="num_total")
    if correct.ndim != 1:
        raise SchemaError(f"num_correct has shape {correct.shape}: give one number for each evaluation, [E].")
    try:
        total = np.broadcast_to(total, correct.shape)
    except ValueError as error:
        raise SchemaError(
            f"num_total has shape {total.shape}, num_correct {correct.shape}: give one total, or one a row."
        ) from error
    unusable = ~(np.isfinite(correct) & np.isfinite(total))
    if unusable.any():
        row = int(np.argmax(unusable))
        raise SchemaError(
            f"evaluation {row} ({correct[row]:g} of {total[row]:g}) is not a finite number: drop that "
            "evaluation."
        )
    rules = [
        ((correct % 1 != 0) | (total % 1 != 0), "is not whole: give counts of problems, not accuracies"),
        (total < 1, "has no problems: num_total must be at least 1"),
        (correct < 0, "is negative: num_correct must be at least 0"),
        (correct > total, "has more right answers than problems"),
    ]
    for broken, complaint in rules:
        if broken.any():
            row = int(np.argmax(broken))
            raise SchemaError(f"evaluation {row} ({correct[row]:g} of {total[row]:g}) {complaint}.")
    return correct, total.copy()
