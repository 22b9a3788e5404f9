"""What detectors read from a run: one matrix a step and policy, with steps without signal as NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from gradscope import derive
from gradscope.detectors.finding import Skipped
from gradscope.stats.grams import gram_fault

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PolicySeries:
    """The gradients of one policy's slots, step by step.

    Attributes:
        policy: Its name.
        steps: Training steps, `[T]`.
        slots: Slots that the policy serves, in order.
        roles: The role of each slot.
        gram: Sum of the step's updates' Grams, `[T, K, K]`; NaN where a slot had no row or no signal.
    """

    policy: str
    steps: Array
    slots: tuple[str, ...]
    roles: tuple[str, ...]
    gram: Array

    def role_names(self) -> list[str]:
        """Returns the roles that train this policy, in the workflow's order."""
        return list(dict.fromkeys(self.roles))

    def slots_of(self, role: str) -> list[int]:
        """Returns the positions of a role's slots."""
        return [place for place, name in enumerate(self.roles) if name == role]

    def slot_gram(self, role: str) -> Array:
        """Returns the products among one role's slots, `[T, N, N]`."""
        own = self.slots_of(role)
        return self.gram[:, own][:, :, own]

    def role_gram(self) -> Array:
        """Returns the products among the policy's roles, `[T, R, R]`, from the slots that have signal."""
        return derive.role_gram(self.gram, derive.membership(self.roles, self.role_names()))


def table(run: xr.DataTree, name: str) -> xr.Dataset:
    """Returns a group of the run with the labels of its dims; an empty dataset where nobody wrote it."""
    if name not in run.children:
        return xr.Dataset()
    # Not everything that is inherited: the root's label `policy` would hide the variable /updates/policy.
    own = run.children[name].to_dataset(inherit=False)
    root = run.to_dataset()
    return own.assign_coords({dim: root[dim] for dim in own.dims if dim in root.coords})


def need(run: xr.DataTree, group: str, *names: str) -> xr.Dataset:
    """Returns a group that holds those variables.

    Raises:
        Skipped: The run lacks one of them, or holds no value of it.
    """
    dataset = table(run, group)
    missing = [name for name in names if name not in dataset or not dataset[name].notnull().any()]
    if missing:
        raise Skipped(f"the run holds no {' and no '.join(f'/{group}/{name}' for name in missing)}")
    return dataset


def sound(
    dataset: xr.Dataset, group: str, name: str, *, largest: float | xr.DataArray = np.inf
) -> xr.DataArray:
    """Returns a variable whose numbers, where there are any, lie between 0 and `largest`.

    Raises:
        Skipped: One does not; says which, and at which place.
    """
    variable = dataset[name]
    limits = xr.zeros_like(variable) + largest
    broken = ((variable < 0) | (variable > limits) | np.isinf(variable)).values
    if broken.any():
        place = np.unravel_index(int(np.argmax(broken)), broken.shape)
        where = " ".join(
            f"{dim} {dataset[dim].values[at] if dim in dataset.coords else at}"
            for dim, at in zip(variable.dims, place, strict=True)
        )
        limit = f"and {limits.values[place]:g}" if np.isfinite(limits.values[place]) else "and any number"
        raise Skipped(
            f"/{group}/{name} is {variable.values[place]:g} at {where}, not between 0 {limit}: damaged log?"
        )
    return variable


def slot_roles(run: xr.DataTree) -> dict[str, str]:
    """Returns each slot's role, in the writer's order.

    Raises:
        Skipped: The run does not say.
    """
    root = run.to_dataset()
    if "slot_role" not in root:
        raise Skipped("the run does not say which slot has which role")
    return {
        str(slot): str(role) for slot, role in zip(root["slot"].values, root["slot_role"].values, strict=True)
    }


def policy_series(run: xr.DataTree) -> list[PolicySeries]:
    """Returns the series of every policy, all on the axis of the run's steps.

    Raises:
        Skipped: The run holds no Grams, they cannot be products of gradients, or it does not say which slot
            has which role and policy.
    """
    updates = need(run, "updates", "gram", "step", "policy")
    _check_updates(updates)
    roles = slot_roles(run)
    if "slot_policy" not in run.to_dataset():
        raise Skipped("the run does not say which slot trains which policy")
    return [
        _series(run, policy, roles, counted="num_signal_rows" in updates) for policy in derive.policies(run)
    ]


def _check_updates(updates: xr.Dataset) -> None:
    """Refuses what the detectors would take for gradients although it cannot be."""
    gram = updates["gram"]
    if gram.dims != ("update", "slot", "slot_b"):
        raise Skipped(
            f"/updates/gram has dims ({', '.join(map(str, gram.dims))}), expected (update, slot, slot_b)"
        )
    fault = gram_fault(gram.values.astype(np.float64))
    if fault:
        update, first, second, complaint = fault
        slots = " and ".join(str(gram["slot"].values[slot]) for slot in dict.fromkeys((first, second)))
        place = gram["update"].values[update]
        raise Skipped(f"/updates/gram has {complaint} at update {place} (slot {slots}): damaged log?")
    if "num_signal_rows" in updates:
        sound(updates, "updates", "num_signal_rows")


def _series(run: xr.DataTree, policy: str, roles: Mapping[str, str], *, counted: bool) -> PolicySeries:
    summed = derive.step_gram(run, policy)
    gram = np.where(np.isfinite(summed.values), summed.values, np.nan)
    # A step whose rows have no gradient says nothing about direction or size either.
    dead = np.diagonal(gram, axis1=1, axis2=2) == 0
    if counted:
        dead = dead | (derive.step_count(run, policy, variable="num_signal_rows").values == 0)
    slots = [str(slot) for slot in summed["slot"].values]
    return PolicySeries(
        policy=policy,
        steps=summed["step"].values.astype(np.float64),
        slots=tuple(slots),
        roles=tuple(roles[slot] for slot in slots),
        gram=np.where(dead[:, :, None] | dead[:, None, :], np.nan, gram),
    )


def all_steps(run: xr.DataTree) -> Array:
    """Returns every training step that the run logged, `[T]`, increasing."""
    tables = [table(run, name) for name in ("train", "updates")]
    logged = [dataset["step"].values for dataset in tables if "step" in dataset]
    return np.unique(np.concatenate(logged)).astype(np.float64)


def role_means(
    run: xr.DataTree, name: str, roles: list[str], steps: Array, *, largest: float = np.inf
) -> Array:
    """Returns a record of /train as row-weighted means over each role's slots, `[T, R]`; NaN if absent.

    Raises:
        Skipped: A number in it is negative or above `largest`.
    """
    train = table(run, "train")
    means = np.full((steps.size, len(roles)), np.nan)
    if name not in train:
        return means
    record = sound(train, "train", name, largest=largest)
    counts = sound(train, "train", "num_rows") if "num_rows" in train else xr.ones_like(record)
    owners = slot_roles(run)
    rows = np.searchsorted(steps, train["step"].values)
    for place, role in enumerate(roles):
        own = [slot for slot, owner in owners.items() if owner == role]
        weights = counts.sel(slot=own).fillna(0)
        means[rows, place] = record.sel(slot=own).weighted(weights).mean("slot").values
    return means


def role_rows(run: xr.DataTree, series: PolicySeries) -> Array | None:
    """Returns each role's rows with signal (all rows where those were not counted), `[T, R]`, if known."""
    updates = table(run, "updates")
    for name in ("num_signal_rows", "num_rows"):
        if name in updates and updates[name].notnull().any():
            sound(updates, "updates", name)
            counts = derive.step_role_count(run, series.policy, variable=name)
            return np.asarray(counts.sel(role=series.role_names()).values, dtype=np.float64)
    return None


def sound_evaluations(run: xr.DataTree) -> xr.Dataset:
    """Returns the evaluations, whose counts can be counts.

    Raises:
        Skipped: There are none, or a count cannot be.
    """
    evaluations = need(run, "eval", "num_correct", "num_total", "step")
    total = sound(evaluations, "eval", "num_total")
    correct = sound(evaluations, "eval", "num_correct", largest=total.fillna(np.inf))
    for count in (correct, total):
        broken = (count % 1 > 0).values
        if broken.any():
            row = int(np.argmax(broken))
            raise Skipped(
                f"/eval/{count.name} is {count.values[row]:g} at evaluation {row}, not a whole number: "
                "accuracies instead of counts?"
            )
    return evaluations
