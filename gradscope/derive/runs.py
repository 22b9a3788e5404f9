"""The derived quantities of an opened run, by name: labelled series over its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradscope.derive.arrays import (
    Array,
    amplification,
    amplification_if_aligned,
    amplification_if_orthogonal,
    coherence,
    diagonal_share,
    expected_energy_share,
    expected_norm_share,
    membership,
    norm_share,
    norms,
    num_present,
    projection_share,
    role_gram,
    summed,
)
from gradscope.errors import RunFileError, unknown_name

if TYPE_CHECKING:
    import xarray as xr


def policies(run: xr.DataTree) -> list[str]:
    """Returns the policies that slots are routed to, in the order of the slots."""
    return list(dict.fromkeys(_names(run["slot_policy"])))


def policy_slots(run: xr.DataTree, policy: str) -> list[str]:
    """Returns the slots routed to a policy.

    Raises:
        UnknownNameError: No slot is.
    """
    owners = zip(_names(run["slot"]), _names(run["slot_policy"]), strict=True)
    slots = [slot for slot, owner in owners if owner == policy]
    if not slots:
        raise unknown_name("policy", policy, policies(run))
    return slots


def step_gram(run: xr.DataTree, policy: str, *, variable: str = "gram") -> xr.DataArray:
    """Returns the sum of a policy's products over the updates of each step: (step, slot, slot_b).

    A sum of squares, not the square of the sum. Has every step of the run; NaN where the policy had no
    update or the slot no rows in any; 0 between slots that had rows in different updates only. `variable` is
    `gram` or `gram_cross`.

    Raises:
        RunFileError: The run has no such variable.
        UnknownNameError: No slot is routed to the policy.
    """
    slots = policy_slots(run, policy)
    return _over_steps(run, policy, variable, summed).sel(slot=slots, slot_b=slots)


def step_count(run: xr.DataTree, policy: str, *, variable: str = "num_rows") -> xr.DataArray:
    """Returns the sum of a per-slot count over the updates of each step: (step, slot).

    Raises as `step_gram`.
    """
    return _over_steps(run, policy, variable, _summed_counts).sel(slot=policy_slots(run, policy))


def step_role_gram(run: xr.DataTree, policy: str, *, variable: str = "gram") -> xr.DataArray:
    """Returns the sum over a step's updates of Z'GZ of the policy's roles: (step, role, role_b).

    Raises as `step_gram`.
    """
    # Z'GZ of the sum is the sum of the updates' Z'GZ, since what an update lacks adds 0 to either.
    gram = step_gram(run, policy, variable=variable)
    roles, membership_KR = _roles(run, gram["slot"].values.tolist())
    values = role_gram(gram.values, membership_KR)
    return _array(
        values, {"step": gram["step"], "role": roles, "role_b": roles}, "products of the roles' gradients"
    )


def step_role_count(run: xr.DataTree, policy: str, *, variable: str = "num_rows") -> xr.DataArray:
    """Returns the sum of a count over a role's slots and a step's updates: (step, role).

    Raises as `step_gram`.
    """
    count = step_count(run, policy, variable=variable)
    roles, membership_KR = _roles(run, count["slot"].values.tolist())
    there = (~np.isnan(count.values)) @ membership_KR > 0
    values = np.where(there, np.nan_to_num(count.values) @ membership_KR, np.nan)
    return _array(values, {"step": count["step"], "role": roles}, str(count.attrs["long_name"]))


def role_norms(run: xr.DataTree, policy: str) -> xr.DataArray:
    """Returns the norm of each role's gradient on a policy: (step, role); raises as `step_gram`."""
    gram = step_role_gram(run, policy)
    return _array(
        norms(gram.values), {"step": gram["step"], "role": gram["role"]}, "norm of the role's gradient"
    )


def role_shares(run: xr.DataTree, policy: str) -> xr.Dataset:
    """Returns the shares of the policy's roles, each (step, role), as far as the run has what they need.

    energy and norm always; expected_energy and expected_norm, what counts alone would give, from the rows
    with signal (all rows where those were not counted); signal from gram_cross; update (step, contributor)
    from update_gram.

    Raises:
        RunFileError: The run has no Grams.
        UnknownNameError: No slot is routed to the policy.
    """
    import xarray as xr

    gram = step_role_gram(run, policy)
    axes = {"step": gram["step"], "role": gram["role"]}
    shares = {
        "energy": _array(diagonal_share(gram.values), axes, "energy share"),
        "norm": _array(norm_share(gram.values), axes, "norm share"),
    }
    counts = _told_counts(run, policy)
    if counts is not None:
        shares["expected_energy"] = _array(expected_energy_share(counts), axes, "energy share by counts only")
        shares["expected_norm"] = _array(expected_norm_share(counts), axes, "norm share by counts only")
    if "gram_cross" in run["updates"]:
        cross = step_role_gram(run, policy, variable="gram_cross").values
        shares["signal"] = _array(diagonal_share(cross), axes, "signal share")
    if "update_gram" in run["updates"]:
        update = _over_steps(run, policy, "update_gram", summed)
        own = {"step": update["step"], "contributor": update["contributor"]}
        shares["update"] = _array(projection_share(update.values), own, "update share")
    return xr.Dataset(shares)


def copy_measures(run: xr.DataTree, policy: str, role: str) -> xr.Dataset:
    """Returns coherence and amplification of a role's slots on a policy, with the amplification's two lines.

    Each (step): coherence, amplification, orthogonal, aligned; NaN with fewer than two slots at the step.
    Raises as `step_gram`.
    """
    import xarray as xr

    gram = step_gram(run, policy)
    role_of = dict(zip(_names(run["slot"]), _names(run["slot_role"]), strict=True))
    own = [slot for slot in gram["slot"].values.tolist() if role_of[slot] == role]
    values = gram.sel(slot=own, slot_b=own).values
    enough = num_present(values) >= 2
    measures = {
        "coherence": (coherence, "coherence of the role's copies"),
        "amplification": (amplification, "gradient amplification"),
        "orthogonal": (amplification_if_orthogonal, "gradient amplification of orthogonal copies"),
        "aligned": (amplification_if_aligned, "gradient amplification of aligned copies"),
    }
    return xr.Dataset(
        {
            name: _array(np.where(enough, measure(values), np.nan), {"step": gram["step"]}, words)
            for name, (measure, words) in measures.items()
        }
    )


def _told_counts(run: xr.DataTree, policy: str) -> Array | None:
    """Returns the counts that shares are compared with, `[T, R]`; None where none was ever told."""
    for name in ("num_signal_rows", "num_rows"):
        if name in run["updates"]:
            counts = step_role_count(run, policy, variable=name).values
            if not np.isnan(counts).all():
                return counts
    return None


def _over_steps(
    run: xr.DataTree, policy: str, variable: str, total: Callable[[Array, NDArray[np.intp]], Array]
) -> xr.DataArray:
    """Returns a policy's updates summed within each step by `total`; NaN at steps without one."""
    if "updates" not in run.children or variable not in run["updates"]:
        raise RunFileError(f"run: /updates has no '{variable}'. Record it with probes (probes.enabled=true).")
    updates = run["updates"].to_dataset()
    source = updates[variable]
    own = updates["policy"].values == policy
    steps, starts = np.unique(updates["step"].values[own], return_index=True)
    values = source.values[own]
    train = run["train"].to_dataset()["step"].values if "train" in run.children else steps
    every = np.union1d(train, updates["step"].values)
    series = np.full((len(every), *values.shape[1:]), np.nan)
    if len(steps):
        series[np.searchsorted(every, steps)] = total(values, starts)
    axes = {"step": every, **{str(dim): source[dim] for dim in source.dims[1:]}}
    return _array(series, axes, str(source.attrs["long_name"]))


def _summed_counts(counts: Array, starts: NDArray[np.intp]) -> Array:
    """Returns the sums of runs of updates, `[U, K]` to `[S, K]`; NaN where a slot has no count in any."""
    there = ~np.isnan(counts)
    sums = np.add.reduceat(np.where(there, counts, 0.0), starts, axis=0)
    return np.where(np.logical_or.reduceat(there, starts, axis=0), sums, np.nan)


def _roles(run: xr.DataTree, slots: Sequence[str]) -> tuple[list[str], Array]:
    """Returns the roles that the slots have, in the run's order, and their membership matrix."""
    role_of = dict(zip(_names(run["slot"]), _names(run["slot_role"]), strict=True))
    own = [role_of[slot] for slot in slots]
    roles = [role for role in _names(run["role"]) if role in own]
    return roles, membership(own, roles)


def _array(values: Array, axes: Mapping[str, Any], long_name: str) -> xr.DataArray:
    import xarray as xr

    coordinates = {dim: np.asarray(labels) for dim, labels in axes.items()}
    return xr.DataArray(values, coordinates, tuple(axes), attrs={"units": "1", "long_name": long_name})


def _names(labels: Any) -> list[str]:
    return [str(label) for label in labels.values]
