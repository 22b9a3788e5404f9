"""Groups runs into cells: runs that differ in nothing but their seed are one cell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xarray as xr

from gradscope.errors import DataError

HOW_IT_RAN = {
    "import", "run", "tracking", "probes", "evaluate", "model.device", "train.threads",
    "train.checkpoint_every", "train.micro_batch_tokens", "rollout.max_batch_rows",
}  # fmt: skip
"""Sections and keys of a configuration that do not change what is learned, beside every key called `seed`."""
ROUTING = "policy.routing"
RUN_ID_LENGTH = 8
LONGEST_SETTINGS = 60
"""Characters of a configuration that may stand for a name."""
SIZE = re.compile(r"\d+(?:\.\d+)?[MB]\b", re.IGNORECASE)


@dataclass(frozen=True)
class Cell:
    """Runs of one workflow, policy layout, model scale, task and settings.

    Attributes:
        setting: The cell's name without its policy layout, as in `Voting-0.6B-Math`; without a
            configuration the name of its run.
        layout: `SP` (one policy for all roles), `IP` (one a role), else the map in words.
        name: The cell's name, as in `Voting-IP-0.6B-Math`.
        runs: Its runs, in the order given.
        seeds: Seed of each run as text, `?` where the file has none.
    """

    setting: str
    layout: str
    name: str
    runs: tuple[xr.DataTree, ...]
    seeds: tuple[str, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles in the order of the workflow."""
        return tuple(dict.fromkeys(role for run in self.runs for role in names(run, "role")))

    @property
    def size(self) -> str:
        """How many runs there are, in words."""
        distinct = len(set(self.seeds))
        if len(self.runs) == 1:
            return "one seed"
        if distinct == len(self.runs):
            return f"{distinct} seeds"
        return f"{len(self.runs)} runs of {distinct} seed{'s' if distinct > 1 else ''}"


def group_cells(runs: Sequence[xr.DataTree]) -> list[Cell]:
    """Returns the cells of the runs in order of appearance, cells of one setting side by side.

    Runs whose configurations differ in more than the seed are different cells; the keys that differ are then
    part of the name. A run without a configuration is a cell of its own.

    Raises:
        DataError: A run is given twice.
    """
    _refuse_repeats(runs)
    groups: dict[str, list[xr.DataTree]] = {}
    for run in runs:
        groups.setdefault(_key(run), []).append(run)
    members = list(groups.values())
    cells = [
        Cell(*name, tuple(group), tuple(str(run.attrs.get("seed", "?")) for run in group))
        for name, group in zip(_cell_names([group[0] for group in members]), members, strict=True)
    ]
    order = list(dict.fromkeys(cell.setting for cell in cells))
    return sorted(cells, key=lambda cell: (order.index(cell.setting), cell.layout))


def policy_layout(run: xr.DataTree) -> str:
    """Returns `SP`, `IP`, or which roles or slots share, as in `generator+evaluator | aggregator`."""
    slot_role, slot_policy = names(run, "slot_role"), names(run, "slot_policy")
    roles, policies = list(dict.fromkeys(slot_role)), list(dict.fromkeys(slot_policy))
    pairs = set(zip(slot_role, slot_policy, strict=True))
    if len(roles) == 1 and len(policies) == 1:
        return "SP" if _plugin(_config(run), "policy", key="routing") == "shared" else "IP"
    if len(policies) == 1:
        return "SP"
    if len(pairs) == len(roles) == len(policies):
        return "IP"
    by_role = len(pairs) == len(roles)
    owner = dict(zip(slot_role if by_role else names(run, "slot"), slot_policy, strict=True))
    return " | ".join("+".join(name for name in owner if owner[name] == policy) for policy in policies)


def names(run: xr.DataTree, variable: str) -> list[str]:
    """Returns the texts of a label or variable in the root of a run."""
    return [str(value) for value in run.to_dataset()[variable].values]


def _cell_names(runs: Sequence[xr.DataTree]) -> list[tuple[str, str, str]]:
    """Returns (setting, layout, name) of one run of each cell.

    Settings that would read alike although more than the policy layout differs get the keys that differ.
    """
    words, settings = [_words(run) for run in runs], [_settings(run) for run in runs]
    found = []
    for run, own_words, own in zip(runs, words, settings, strict=True):
        alike = [
            other for other, other_words in zip(settings, words, strict=True) if other_words == own_words
        ]
        keys = {key for other in alike for key in other if len({known.get(key) for known in alike}) > 1}
        differing = [f"{key}={own.get(key, 'unset')}" for key in sorted(keys) if not key.startswith(ROUTING)]
        note = f" ({', '.join(differing)})" if differing else ""
        layout = policy_layout(run)
        full = [own_words[0], layout, *own_words[1:]]
        found.append(("-".join(own_words) + note, layout, "-".join(full) + note))
    return found


def _words(run: xr.DataTree) -> list[str]:
    """Returns workflow or trainer, scale and task; without those the configuration.

    Where there is none, or a long one, the run's name.
    """
    config = _config(run)
    how = _plugin(config, "workflow") or _plugin(config, "trainer")
    words = [_title(how), _scale(config), _title(_plugin(config, "task"))]
    if any(words):
        return [word for word in words if word]
    settings = _settings(run)
    text = ", ".join(f"{key}={value}" for key, value in settings.items())
    if run.name and (set(settings) == {"run"} or len(text) > LONGEST_SETTINGS):
        return [run.name]
    return [text]


def _refuse_repeats(runs: Sequence[xr.DataTree]) -> None:
    seen: set[str] = set()
    for run in runs:
        run_id = str(run.attrs.get("run_id", ""))
        if run_id and run_id in seen:
            raise DataError(f"run {run_id} is given twice; a copy is no second seed. Name each run once.")
        seen.add(run_id)


def _config(run: xr.DataTree) -> Mapping[str, Any]:
    config = json.loads(run.attrs.get("config_json") or "{}")
    return config if isinstance(config, dict) else {}


def _key(run: xr.DataTree) -> str:
    return json.dumps([policy_layout(run), sorted(_settings(run).items())])


def _settings(run: xr.DataTree) -> dict[str, str]:
    """Returns the dotted keys that make a cell; for a run without any configuration, its id."""
    kept = {}
    for key, value in _flatten(_config(run)):
        section, leaf = key.partition(".")[0], key.rpartition(".")[2]
        if leaf != "seed" and not {key, section} & HOW_IT_RAN:
            kept[key] = value
    return kept or {"run": str(run.attrs.get("run_id", ""))[:RUN_ID_LENGTH]}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return pairs


def _plugin(config: Mapping[str, Any], section: str, *, key: str = "name") -> str:
    value = config.get(section, "")
    value = value.get(key, "") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _scale(config: Mapping[str, Any]) -> str:
    """Returns the size in the model's name, as `0.6B`, or the name where it holds none."""
    name = _plugin(config, "model", key="path").rstrip("/").rpartition("/")[2]
    size = SIZE.search(name)
    return size.group().upper() if size else name


def _title(name: str) -> str:
    """Returns `Eval-Opt` for `eval_opt`; of `module:attribute` only the attribute counts."""
    return "-".join(word[:1].upper() + word[1:] for word in name.rpartition(":")[2].split("_"))
