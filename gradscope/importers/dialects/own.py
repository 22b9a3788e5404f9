"""gradscope's own names, as exports, live mirrors and `metrics.jsonl` have them."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect, Trap
from gradscope.schema import TABLES

MIRROR = (
    "gradscope's metrics.jsonl holds no evaluations, inner products or numbers of updates by slot: the run "
    "file beside it does, and needs no import."
)


def dialect() -> Dialect:
    """Exports and mirrors of gradscope: train/[SLOT/]..., updates/POLICY/..., eval/DATASET/..."""
    rules: dict[str, str] = {}
    by_slot = [variable.name for variable in TABLES["train"].variables if "slot" in variable.dims]
    for variable in TABLES["train"].variables:
        if variable.dims == ("step", "phase"):
            rules[f"(?:train/)?{variable.name}/(?P<phase>.+)"] = variable.name
        elif variable.dims == ("step", "slot"):
            rules[f"train/(?P<slot>.+)/{variable.name}"] = variable.name
            rules[f"{variable.name}/(?P<slot>.+)"] = variable.name
        elif variable.name not in ("step", "segment"):
            rules[f"(?:train/)?{variable.name}"] = variable.name
    place = r"updates/(?P<policy>.+?)(?:/(?P<minibatch>\d+))?"
    for variable in TABLES["updates"].variables:
        if variable.dims == ("update",) and variable.name not in ("update", "step", "segment", "policy"):
            rules[f"{place}/{variable.name}"] = variable.name
        elif variable.dims == ("update", "slot"):
            rules[f"{place}/{variable.name}/(?P<slot>.+)"] = variable.name
        elif variable.dims == ("update", "slot", "slot_b"):
            rules[f"{place}/{variable.name}/(?P<slot>[^|]+)[|](?P<slot_b>[^|]+)"] = variable.name
    rules["user/(?P<user>.+)"] = ""  # a name of the caller's own
    evaluation = "eval/(?P<dataset>.+)/(?P<sampling>greedy|sampled|unstated)"
    for name in ("num_correct", "num_total", "temperature"):
        rules[f"{evaluation}/{name}"] = name
    rules[f"{evaluation}/accuracy"] = "eval_accuracy"
    for name in ("role_accuracy", "role_tokens_mean"):
        rules[f"{evaluation}/(?P<role>.+)/{name}"] = name
    return Dialect(rules=rules, traps=(Trap(f"(?:{'|'.join(by_slot)})/.+", MIRROR),))
