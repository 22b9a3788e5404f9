"""What the gradient figures read from a run, beyond what `gradscope.derive` hands out by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from gradscope import derive
from gradscope.figures.base import NothingToDrawError
from gradscope.figures.cells import Cell, group_cells, names
from gradscope.stats.windows import Windows, windows_for

WINDOWS = ("early", "late")


def cells_with_gradients(runs: Sequence[xr.DataTree]) -> list[Cell]:
    """Returns the cells of those runs that hold gradients.

    Raises:
        NothingToDrawError: None does.
        DataError: A run is given twice.
    """
    measured = [_finite(run) for run in runs if _has_gradients(run)]
    if not measured:
        raise NothingToDrawError(
            "no run holds gradients (/updates/gram is empty or absent). Train with probes.enabled=true."
        )
    return group_cells(measured)


def role_norms(run: xr.DataTree) -> xr.DataArray:
    """Returns the norm of each role's gradient, (step, role); squares add over the policies a role trains."""
    parts = [derive.role_norms(run, policy) for policy in derive.policies(run)]
    joined = xr.concat(parts, dim="policy", join="outer", coords="minimal", compat="override")
    squares = (joined**2).sum("policy", min_count=1).sel(role=names(run, "role"))
    return squares.copy(data=np.sqrt(squares.values)).assign_attrs(parts[0].attrs)


def shared_policies(cell: Cell) -> list[str]:
    """Returns the policies of a cell that two or more roles train."""
    run = cell.runs[0]
    return [policy for policy in derive.policies(run) if len(set(_roles_of(run, policy))) > 1]


def several_slots(cell: Cell) -> bool:
    """Returns whether some policy of a cell is trained by two or more slots."""
    run = cell.runs[0]
    return any(len(derive.policy_slots(run, policy)) > 1 for policy in derive.policies(run))


def copies(cell: Cell) -> list[tuple[str, str]]:
    """Returns each (policy, role) of a cell of which the role has two or more slots on the policy."""
    run = cell.runs[0]
    pairs = []
    for policy in derive.policies(run):
        roles = _roles_of(run, policy)
        pairs += [(policy, role) for role in dict.fromkeys(roles) if roles.count(role) > 1]
    return pairs


def window_steps(run: xr.DataTree, window: str) -> np.ndarray:
    """Returns the steps of the detectors' first or last window; half of a run that is too short for them."""
    steps = derive.step_gram(run, derive.policies(run)[0])["step"].values
    half = max(1, steps.size // 2)
    windows = windows_for(steps.size) or Windows(slice(0, half), slice(steps.size - half, steps.size))
    return steps[windows.base if window == WINDOWS[0] else windows.final]


def pooled_cosines(run: xr.DataTree, steps: np.ndarray) -> xr.Dataset:
    """Returns realised cosines of all slots, pooled over `steps`: cosine, low and high, (slot, slot_b).

    NaN between slots of separate policies, and where fewer than three steps have a gradient of both slots.
    Low and high bound the 95 % interval over blocks of steps.
    """
    slots = names(run, "slot")
    axes = {"slot": slots, "slot_b": slots}
    nothing = xr.DataArray(np.full((len(slots), len(slots)), np.nan), axes, ("slot", "slot_b"))
    measures = {name: nothing.copy() for name in ("cosine", "low", "high")}
    for policy in derive.policies(run):
        gram = derive.step_gram(run, policy).sel(step=steps)
        own = {"slot": gram["slot"].values, "slot_b": gram["slot_b"].values}
        for measure, values in zip(measures.values(), derive.cosine_interval(gram.values), strict=True):
            # An interval in standard errors knows no bounds, a cosine does.
            measure.loc[own] = values.clip(-1.0, 1.0)
    return xr.Dataset(measures)


def _has_gradients(run: xr.DataTree) -> bool:
    if "updates" not in run.children:
        return False
    updates = run["updates"].to_dataset()
    return "gram" in updates and bool(np.isfinite(updates["gram"]).any())


def _finite(run: xr.DataTree) -> xr.DataTree:
    """Returns the run without the Grams that hold an infinity: what overflowed is not known."""
    updates = run.children["updates"].to_dataset(inherit=False)
    overflowed = (abs(updates["gram"]) == np.inf).any(["slot", "slot_b"])
    if not overflowed.any():
        return run
    copy = run.copy()
    copy.children["updates"].dataset = updates.assign(gram=updates["gram"].where(~overflowed))
    return copy


def _roles_of(run: xr.DataTree, policy: str) -> list[str]:
    """Returns the role of each slot of a policy."""
    role_of = dict(zip(names(run, "slot"), names(run, "slot_role"), strict=True))
    return [role_of[slot] for slot in derive.policy_slots(run, policy)]
