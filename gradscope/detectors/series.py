"""What detectors read from a run: one matrix a step and policy, with steps without signal as NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from gradscope.detectors.finding import Skipped

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
        """Returns Z'GZ, `[T, R, R]`, over the slots that are there; NaN for a role of which none is."""
        names = self.role_names()
        membership = np.array([[role == name for name in names] for role in self.roles], dtype=np.float64)
        there = np.isfinite(np.diagonal(self.gram, axis1=1, axis2=2)) @ membership > 0
        summed = membership.T @ np.nan_to_num(self.gram, nan=0.0) @ membership
        return np.where(there[:, :, None] & there[:, None, :], summed, np.nan)


def table(run: xr.DataTree, name: str) -> xr.Dataset:
    """Returns a group of the run, an empty dataset where nobody wrote it."""
    return run[name].to_dataset() if name in run.children else xr.Dataset()


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


def slots_by_policy(run: xr.DataTree) -> dict[str, list[str]]:
    """Returns the slots that train each policy, in the writer's order.

    Raises:
        Skipped: The run does not say.
    """
    root = run.to_dataset()
    if "slot_policy" not in root:
        raise Skipped("the run does not say which slot trains which policy")
    served: dict[str, list[str]] = {}
    for slot, policy in zip(root["slot"].values, root["slot_policy"].values, strict=True):
        served.setdefault(str(policy), []).append(str(slot))
    return served


def policy_series(run: xr.DataTree) -> Iterator[PolicySeries]:
    """Yields the series of every policy, all on the axis of the run's steps.

    Raises:
        Skipped: The run holds no Grams, or does not say which slot trains which policy.
    """
    updates = need(run, "updates", "gram")
    steps = all_steps(run)
    roles = slot_roles(run)
    for policy, slots in slots_by_policy(run).items():
        own = updates.sel(slot=slots, slot_b=slots).isel(update=(updates["policy"] == policy).values)
        gram = _sum_by_step(own["gram"].values, own["step"].values, steps)
        if "num_signal_rows" in own:
            signal = _sum_by_step(own["num_signal_rows"].values, own["step"].values, steps)
            gram = _without(gram, signal == 0)
        # A step of rows whose gradient is zero says nothing about direction or size either.
        gram = _without(gram, np.diagonal(gram, axis1=1, axis2=2) == 0)
        yield PolicySeries(policy, steps, tuple(slots), tuple(roles[slot] for slot in slots), gram)


def all_steps(run: xr.DataTree) -> Array:
    """Returns every training step that the run logged, `[T]`, increasing."""
    logged = [table(run, name)["step"].values for name in ("train", "updates") if name in run.children]
    return np.unique(np.concatenate(logged)).astype(np.float64)


def role_means(run: xr.DataTree, name: str, roles: list[str], steps: Array) -> Array:
    """Returns a record of /train as row-weighted means over each role's slots, `[T, R]`; NaN if absent."""
    train = table(run, "train")
    if name not in train:
        return np.full((steps.size, len(roles)), np.nan)
    owners = slot_roles(run)
    rows = np.searchsorted(steps, train["step"].values)
    means = np.full((steps.size, len(roles)), np.nan)
    for place, role in enumerate(roles):
        own = [slot for slot, owner in owners.items() if owner == role]
        values = train[name].sel(slot=own)
        weights = train["num_rows"].sel(slot=own) if "num_rows" in train else xr.ones_like(values)
        means[rows, place] = values.weighted(weights.fillna(0)).mean("slot").values
    return means


def _sum_by_step(values: Array, at: NDArray[np.int64], steps: Array) -> Array:
    """Returns sums over the rows of each step, `[T, ...]`; NaN where no row of the step has a value.

    A row with an infinite value is not finite in its sum, and counts as missing.
    """
    shape = (steps.size, *values.shape[1:])
    total, seen = np.zeros(shape), np.zeros(shape, dtype=bool)
    rows = np.searchsorted(steps, at)
    known = ~np.isnan(values)
    np.add.at(total, rows, np.where(known, values, 0.0))
    np.logical_or.at(seen, rows, known)
    return np.where(seen & np.isfinite(total), total, np.nan)


def _without(gram: Array, dead: NDArray[np.bool_]) -> Array:
    """Returns the Gram with rows and columns of the dead slots as NaN."""
    return np.where(dead[:, :, None] | dead[:, None, :], np.nan, gram)
