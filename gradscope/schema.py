"""Schema 1.0 of the run file: the one place that names groups, dims, variables, units and attributes.

K is the number of slots, R of roles. Each table has one axis that grows; its coordinate is a column of the
table. Floats are missing as NaN, counts and flags as -1, strings as the empty string. Variables marked
`required` are never missing and stay integers on reading; other integers come back as floats with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = "1.0"
"""Version of the format; a newer major number is refused by readers, a newer minor number only warns."""

RUN_FILE = "run.h5"
JOURNAL_MARK = ".wal."
"""Journals are called `run.h5.wal.000000`, ...; the number rises with every rotation."""
METRICS_FILE = "metrics.jsonl"

ROOT_ATTRIBUTES: dict[str, str] = {
    "schema_version": "version of this format",
    "gradscope_version": "version of the library that wrote the file",
    "run_id": "random name of the run, kept when it is resumed",
    "created_at": "start of the run, ISO 8601, UTC",
    "finished_at": "when the writer was closed, ISO 8601, UTC; absent unless close() ended the run",
    "config_json": "the run's configuration as JSON",
    "git_hash": "commit of gradscope's own checkout, '-dirty' appended if changed; empty when there is none",
    "packages_json": "versions of the installed packages that matter, as JSON",
    "seed": "seed of the run; absent when none was given",
    "hardware": "processor, number of cores and platform, or what the caller said",
    "journal_sequence": "number of the last journal record that this file contains",
}
DAMAGE = "damage"
"""Root attribute of an opened run: what is lost or cannot be used. Not in any file; absent without damage."""

LABEL_DIMS = ("role", "slot", "module", "phase", "contributor")
"""Dims with names along them; their coordinates stand in the root and are inherited by all groups, so no
variable of a group may have such a name."""
LABELS = (*LABEL_DIMS, "policy")
"""What has names in a run. Policies are no dim: `/updates/policy` says which one an update was of."""
NUMBERED_DIMS = {"policy_number": "number of the policy", "sketch_dim": "number of the random projection"}
"""Dims whose coordinate only counts."""
MIRROR_DIMS = {"role_b": "role", "slot_b": "slot", "contributor_b": "contributor"}
"""A second axis with the same labels goes by another name, since dims are unique within a variable."""
DIM_DESCRIPTIONS = {
    "role": "agent role, in the order of the workflow",
    "slot": "agent instance",
    "module": "adapted module",
    "phase": "part of a training step",
    "contributor": "what moved the parameters: a role, weight decay, or momentum carried over",
}
EXTRA_CONTRIBUTORS = ("decay", "carried")

EVENT_KINDS = (
    "resume", "checkpoint", "checkpoint_damaged", "checkpoint_failed", "nonfinite_update", "skipped_update",
    "alarm", "intervention", "config_change", "probe_disabled", "coverage", "disk_full", "write_failed",
    "compaction_failed", "dropped_records", "dropped_episodes", "episodes_not_recorded", "failed",
    "terminated", "tracker_failed", "momenta_lost",
)  # fmt: skip
"""Kinds that our own code writes and readers know; a caller's own kinds are kept as they are."""


@dataclass(frozen=True)
class Variable:
    """One dataset of the run file.

    Attributes:
        name: Name within its group.
        dims: Names of its axes, the growing one first (none first in the root).
        dtype: `f8`, `f4`, `i8`, `i4`, `i2`, `i1` or `str`.
        units: Unit in UDUNITS spelling, `1` for pure numbers, empty for names.
        long_name: One line for people.
        required: Whether every row has a value, so that integers stay integers on reading.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    units: str
    long_name: str
    required: bool = False

    @property
    def fill(self) -> float | int | str:
        """The value that stands for missing."""
        return fill_value(self.dtype)

    @property
    def numpy_dtype(self) -> str:
        """How numpy calls the type in memory, where texts are Python's own."""
        return "O" if self.dtype == "str" else self.dtype


@dataclass(frozen=True)
class Table:
    """Variables that grow together along one axis.

    Attributes:
        name: Name of the table in journals; equal to the group except for `user_updates`.
        group: HDF5 group that holds it.
        dim: The growing axis; the column of that name is its coordinate.
        description: One line for people.
        variables: All columns but those of the caller's own.
    """

    name: str
    group: str
    dim: str
    description: str
    variables: tuple[Variable, ...]

    @property
    def by_name(self) -> Mapping[str, Variable]:
        """The variables by their names."""
        return _BY_NAME[self.name]

    def variable(self, name: str) -> Variable | None:
        """Returns the variable called `name`, or None."""
        return _BY_NAME[self.name].get(name)


def fill_value(dtype: str) -> float | int | str:
    """Returns what stands for missing in datasets of that dtype."""
    if dtype == "str":
        return ""
    return math.nan if dtype.startswith("f") else -1


def base_dim(dim: str) -> str:
    """Returns the dim whose labels `dim` repeats: `slot` for `slot_b`, otherwise `dim` itself."""
    return MIRROR_DIMS.get(dim, dim)


def dim_description(dim: str) -> str:
    """Returns one line for people about a dim that does not grow."""
    return NUMBERED_DIMS.get(dim) or DIM_DESCRIPTIONS[base_dim(dim)]


def _table(name: str, dim: str, description: str, *rows: str, group: str = "") -> Table:
    """Reads the lines `name | dims after the growing one | dtype | units | long_name`; `!` marks required."""
    variables = []
    for row in rows:
        label, dims, dtype, units, long_name = (part.strip() for part in row.split("|"))
        axes = (dim, *dims.replace(",", " ").split())
        variables.append(Variable(label.rstrip("!"), axes, dtype, units, long_name, label.endswith("!")))
    return Table(name, group or name, dim, description, tuple(variables))


_TABLES = (
    _table(
        "train", "step", "one row a training step (one rollout batch)",
        "step! | | i8 | 1 | training step",
        "segment! | | i4 | 1 | stretch of the run between resumes",
        "epoch | | f8 | 1 | passes over the training problems so far",
        "wall_time | | f8 | s | when the step was logged, counted from 1970-01-01, UTC",
        "loss | | f8 | 1 | training loss",
        "episode_reward_mean | | f8 | 1 | mean reward of the step's episodes",
        "num_updates | | i8 | 1 | optimizer steps in this training step, all policies",
        "seconds | phase | f8 | s | time spent",
        "reward_mean | slot | f8 | 1 | mean reward of the slot's replies",
        "reward_std | slot | f8 | 1 | standard deviation of the rewards",
        "advantage_abs_mean | slot | f8 | 1 | mean magnitude of the advantage",
        "zero_advantage_fraction | slot | f8 | 1 | fraction of replies with advantage 0",
        "accuracy | slot | f8 | 1 | fraction of the slot's own answers that are right",
        "response_tokens_mean | slot | f8 | 1 | mean tokens of a reply",
        "response_tokens_p95 | slot | f8 | 1 | 95th percentile of tokens of a reply",
        "truncated_fraction | slot | f8 | 1 | fraction of replies cut at the token limit",
        "fallback_fraction | slot | f8 | 1 | fraction of replies that the workflow replaced by its fallback",
        "violation_fraction | slot | f8 | 1 | fraction of replies not in the role's format",
        "copy_fraction | slot | f8 | 1 | fraction of replies that repeat a text of their prompt",
        "entropy | slot | f8 | nat | mean entropy of the sampling distribution a token",
        "kl_reference | slot | f8 | nat | mean divergence from the reference policy a token",
        "kl_rollout | slot | f8 | nat | mean divergence of the rollout engine from the trainer a token",
        "kl_old | slot | f8 | nat | mean divergence from the policy that sampled the replies a token",
        "policy_lag | slot | f8 | 1 | updates between sampling and training",
        "clip_fraction | slot | f8 | 1 | fraction of tokens whose ratio is clipped",
        "perplexity | slot | f8 | 1 | perplexity of the sampled replies",
        "chi2_token | slot | f8 | 1 | mean chi-squared divergence from the sampling policy a token",
        "num_tokens | slot | i8 | 1 | reply tokens",
        "num_rows | slot | i8 | 1 | replies",
    ),
    _table(
        "updates", "update", "one row an update: one optimizer step of one policy",
        "update! | | i8 | 1 | running number of the update",
        "step! | | i8 | 1 | training step of the update",
        "segment! | | i4 | 1 | stretch of the run between resumes",
        "policy! | | str | | policy that was updated",
        "minibatch | | i8 | 1 | number of the update among those of its policy and step",
        "learning_rate | | f8 | 1 | learning rate",
        "grad_norm | | f8 | 1 | norm of the gradient before clipping",
        "clip_factor | | f8 | 1 | factor that clipping applied",
        "update_norm | | f8 | 1 | norm of the applied change",
        "decay_norm | | f8 | 1 | norm of the part of it that weight decay made",
        "attribution_residual | | f8 | 1 | relative gap between the contributions' sum and the change",
        "skipped | | i1 | 1 | 1 where the optimizer step was skipped",
        "num_rows | slot | i8 | 1 | rows of the slot",
        "num_signal_rows | slot | i8 | 1 | rows whose advantage is not 0",
        "num_tokens | slot | i8 | 1 | reply tokens of the slot",
        "advantage_abs_sum | slot | f8 | 1 | sum of advantage magnitudes",
        "loss_weight | slot | f8 | 1 | weight of the slot's rows as applied in the loss",
        "dot_previous_update | slot | f8 | 1 | product of the slot's gradient with the previous change",
        "dot_ema | slot | f8 | 1 | product of the slot's gradient with its running mean",
        "gram | slot slot_b | f8 | 1 | inner products of the slots' gradients",
        "gram_cross | slot slot_b | f8 | 1 | products between halves of the update's problems",
        "update_gram | contributor contributor_b | f8 | 1 | inner products of the applied contributions",
        "effect | role contributor | f8 | 1 | first-order fall of a role's loss by a contribution",
        "influence | slot contributor | f8 | nat | divergence of the slot's replies by a contribution",
    ),
    _table(
        "modules", "module_update", "one row an update whose modules were looked at one by one",
        "module_update! | | i8 | 1 | running number of the row",
        "step! | | i8 | 1 | training step of the update",
        "update! | | i8 | 1 | running number of the update, as in /updates",
        "grad_norm | slot module | f4 | 1 | norm of the slot's gradient in the module",
        "gram | module slot slot_b | f4 | 1 | inner products of the slots' gradients in the module",
        "change_gram | module contributor contributor_b | f4 | 1 | inner products of changes s(dB A + B dA)",
    ),
    _table(
        "rows", "row", "sampled completions, one by one, where they were measured",
        "row! | | i8 | 1 | running number of the entry",
        "row_id! | | str | | id that leads to the completion's text",
        "step! | | i8 | 1 | training step",
        "update | | i8 | 1 | running number of the update, as in /updates",
        "row_slot | | str | | slot that wrote the completion",
        "problem | | str | | id of the problem",
        "episode | | str | | id of the episode",
        "grad_norm | | f8 | 1 | norm of the row's gradient",
        "advantage | | f8 | 1 | advantage",
        "num_tokens | | i8 | 1 | reply tokens",
        "sketch | sketch_dim | f4 | 1 | seeded projection of the row's gradient",
    ),
    _table(
        "eval", "evaluation", "one row an evaluation",
        "evaluation! | | i8 | 1 | running number of the evaluation",
        "step! | | i8 | 1 | training step after which it was taken",
        "segment! | | i4 | 1 | stretch of the run between resumes",
        "dataset! | | str | | name of the evaluated problems",
        "num_correct | | i8 | 1 | right answers",
        "num_total | | i8 | 1 | answers",
        "temperature | | f8 | 1 | sampling temperature",
        "greedy | | i1 | 1 | 1 where the most likely token was always taken",
        "role_accuracy | role | f8 | 1 | fraction of the role's own answers that are right",
        "role_tokens_mean | role | f8 | 1 | mean tokens of a reply",
    ),
    _table(
        "events", "event", "what happened besides training",
        "event! | | i8 | 1 | running number of the event",
        "step! | | i8 | 1 | training step",
        "kind! | | str | | what kind of event",
        "message! | | str | | one sentence",
    ),
    _table(
        "segments", "segment", "one row a stretch of the run between resumes",
        "segment! | | i8 | 1 | running number of the segment",
        "start_step | | i8 | 1 | first step logged in it",
        "end_step | | i8 | 1 | last step logged in it",
        "resumed_from_step | | i8 | 1 | step of the checkpoint it started from",
        "git_hash | | str | | commit of gradscope's own checkout",
        "world_size | | i8 | 1 | number of processes",
        "created_at | | str | | start of the segment, ISO 8601, UTC",
        "config_json | | str | | configuration as JSON",
    ),
    _table("user", "step", "whatever else was logged a step", "step! | | i8 | 1 | training step"),
    _table(
        "user_updates", "update", "whatever else was logged an update",
        "update! | | i8 | 1 | running number of the update, as in /updates",
        group="user",
    ),
)  # fmt: skip

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}
_BY_NAME = {table.name: {variable.name: variable for variable in table.variables} for table in _TABLES}
USER_TABLES = ("user", "user_updates")
SUPERSEDED = "superseded"
"""Group that keeps what a resume left behind, as `segment_NNN/TABLE`."""

ROOT_VARIABLES = (
    Variable(
        "policy", ("policy_number",), "str", "", "names of the sets of trainable parameters", required=True
    ),
    Variable("slot_role", ("slot",), "str", "", "role of the slot", required=True),
    Variable("slot_policy", ("slot",), "str", "", "policy that the slot's rows train", required=True),
    Variable("module_layer", ("module",), "i4", "1", "number of the layer"),
    Variable("module_kind", ("module",), "str", "", "last part of the module's name", required=True),
)


def describe_tables() -> dict[str, Any]:
    """Returns the schema as JSON values, by which a journal alone says what its columns are.

    Table to group, growing dim and variables; of each variable dims, dtype, units and long_name.
    """
    return {
        table.name: {
            "group": table.group,
            "dim": table.dim,
            "variables": {v.name: [v.dims, v.dtype, v.units, v.long_name] for v in table.variables},
        }
        for table in _TABLES
    }
