"""What of a run has no place in rows of scalars, said where the run holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import xarray as xr

GROUPS = ("modules", "rows", "events", "superseded")
MATRICES = ("update_gram", "effect", "influence")
"""Products of contributions, in /updates."""


def left_out(run: xr.DataTree, lost: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields a sentence for each kind of thing that an export leaves out.

    Args:
        run: The run.
        lost: What the run says of itself, where the tool keeps no texts; None where it does.
    """
    there = [f"/{name}" for name in GROUPS if name in run.children]
    there += [f"/updates/{name}" for name in MATRICES if _is_known(run, name)]
    if "train" in run.children and "segment" in run["train"] and float(run["train"]["segment"].max()) > 0:
        there.append("segments (which stretch between resumes a step is of)")
    if there:
        yield f"left out, since rows of scalars have no place for it: {', '.join(there)}."
    if lost and lost["limits"]:
        yield (
            f"left out: the {len(lost['limits'])} sentences on what the imported log cannot answer. Parquet "
            "keeps them."
        )
    if lost and any(slot.split("/")[0] != role for slot, role in lost["slots"].items()):
        yield "left out: the slots' roles, which are read back from the slots' names. Parquet keeps them."


def _is_known(run: xr.DataTree, name: str) -> bool:
    """Returns whether the run's updates hold a number of that name."""
    if "updates" not in run.children or name not in run["updates"]:
        return False
    return bool(run["updates"][name].notnull().any())
