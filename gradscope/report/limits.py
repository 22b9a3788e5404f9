"""What a log cannot answer, whatever a detector sees in it."""

from __future__ import annotations

import json

import xarray as xr

from gradscope import schema

ALWAYS = (
    "what made what: a log shows what went together; a replay without one role's gradient tests it",
    "whether another seed would do the same: one run is one seed",
)


def unanswerable(run: xr.DataTree) -> tuple[str, ...]:
    """Returns the questions that this run's log leaves open, each with what is missing."""
    damage = str(run.attrs.get(schema.DAMAGE, "")).rstrip(".")
    limits = [*([f"what stood where the log is damaged: {damage}"] if damage else []), *ALWAYS]
    limits += _of_source(run)
    if not _has(run, "eval", "num_correct"):
        limits.append("whether accuracy held: the log holds no evaluations")
    if not _has(run, "updates", "gram"):
        limits.append("which role's gradient did what: the log holds no per-slot Grams")
        return tuple(limits)
    if not _has(run, "updates", "gram_cross"):
        limits.append(
            "how much of the coherence is noise that copies share by working on the same problems: "
            "the log holds no /updates/gram_cross"
        )
    if not _has(run, "updates", "update_gram"):
        limits.append(
            "whose gradient the optimizer's steps came from: Adam rescales gradients and carries them on, "
            "and the log holds no /updates/update_gram"
        )
    root = run.to_dataset()
    if "slot_policy" in root and len(set(root["slot_policy"].values.tolist())) > 1:
        limits.append("how roles on separate policies align: separate policies share no coordinates")
    if not (_has(run, "train", "response_tokens_mean") or _has(run, "train", "violation_fraction")):
        limits.append("whether replies drifted: the log holds neither reply lengths nor format violations")
    return tuple(limits)


def _of_source(run: xr.DataTree) -> list[str]:
    """Returns what the tool whose log was imported does not write down."""
    config = json.loads(run.attrs.get("config_json") or "{}")
    imported = config.get("import") if isinstance(config, dict) else None
    limits = imported.get("limits") if isinstance(imported, dict) else None
    return [str(limit) for limit in limits] if isinstance(limits, list) else []


def _has(run: xr.DataTree, group: str, name: str) -> bool:
    return group in run.children and name in run[group].data_vars and bool(run[group][name].notnull().any())
