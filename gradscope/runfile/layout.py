"""The labels and user variables of one run, from which every array's shape follows.

Labels are only ever appended, so an array of an older layout fits a newer one by padding at the end.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.errors import SchemaError, unknown_name
from gradscope.schema import (
    EXTRA_CONTRIBUTORS,
    LABEL_DIMS,
    LABELS,
    MIRROR_DIMS,
    NUMBERED_DIMS,
    ROOT_VARIABLES,
    TABLES,
    USER_TABLES,
    Variable,
    base_dim,
)

_NO_USER: dict[str, tuple[Variable, ...]] = dict.fromkeys(USER_TABLES, ())


@dataclass(frozen=True)
class Layout:
    """Labels along every named dim, and the variables that only this run has.

    Attributes:
        labels: Dim to labels, for each of `schema.LABELS`.
        slot_role: Role of each slot, in the order of the slots.
        slot_policy: Policy of each slot.
        user: Variables of the two user tables.
        sketch_dim: Length of a row's sketch; 0 until one is written.
    """

    labels: Mapping[str, tuple[str, ...]]
    slot_role: tuple[str, ...]
    slot_policy: tuple[str, ...]
    user: Mapping[str, tuple[Variable, ...]] = field(default_factory=lambda: dict(_NO_USER))
    sketch_dim: int = 0

    @classmethod
    def of_slots(cls, slots: Mapping[str, str], policies: Mapping[str, str]) -> Layout:
        """Returns the layout of a new run.

        Args:
            slots: Slot to role, in the workflow's order.
            policies: Slot to policy.

        Raises:
            SchemaError: A role is called as what moves parameters besides roles.
        """
        roles = tuple(dict.fromkeys(slots.values()))
        taken = [role for role in roles if role in EXTRA_CONTRIBUTORS]
        if taken:
            raise SchemaError(
                f"slots: a role cannot be called '{taken[0]}', since {' and '.join(EXTRA_CONTRIBUTORS)} are "
                "contributors of the file's own. Give it another name."
            )
        labels = dict.fromkeys(LABELS, ()) | {
            "role": roles,
            "slot": tuple(slots),
            "policy": tuple(dict.fromkeys(policies[slot] for slot in slots)),
            "contributor": roles + EXTRA_CONTRIBUTORS,
        }
        return cls(labels, tuple(slots.values()), tuple(policies[slot] for slot in slots))

    def size(self, dim: str) -> int:
        """Returns the length of a dim that does not grow."""
        if dim == "sketch_dim":
            return self.sketch_dim
        return len(self.labels["policy" if dim == "policy_number" else base_dim(dim)])

    def coordinates(self) -> dict[str, list[str] | list[int]]:
        """Returns the coordinate of every dim that does not grow and is not empty."""
        named: dict[str, list[str] | list[int]] = {
            dim: list(self.labels[base_dim(dim)]) for dim in (*LABEL_DIMS, *MIRROR_DIMS)
        }
        numbered: dict[str, list[str] | list[int]] = {
            dim: list(range(self.size(dim))) for dim in NUMBERED_DIMS
        }
        return {dim: values for dim, values in {**named, **numbered}.items() if values}

    def root_values(self) -> dict[Variable, list[str] | list[int]]:
        """Returns the values of the root's variables, without empty ones."""
        modules = self.labels["module"]
        values: dict[str, list[str] | list[int]] = {
            "policy": list(self.labels["policy"]),
            "slot_role": list(self.slot_role),
            "slot_policy": list(self.slot_policy),
            "module_layer": [module_layer(module) for module in modules],
            "module_kind": [module.rsplit(".", 1)[-1] for module in modules],
        }
        return {variable: values[variable.name] for variable in ROOT_VARIABLES if values[variable.name]}

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Returns the shape of one row of a variable."""
        return tuple(self.size(dim) for dim in variable.dims[1:])

    def empty_row(self, variable: Variable) -> NDArray[Any]:
        """Returns one row of a variable with nothing in it, to be copied; `[1, ...]`."""
        key = (variable.name, variable.dims, variable.dtype)
        row = self._empty_rows.get(key)
        if row is None:
            row = np.full((1, *self.shape(variable)), variable.fill, dtype=variable.numpy_dtype)
            self._empty_rows[key] = row
        return row

    def variable(self, table: str, name: str) -> Variable | None:
        """Returns a variable of the schema or of the user, or None."""
        return self._variables[table].get(name)

    def index(self, dim: str) -> Mapping[str, int]:
        """Returns label to position along a dim."""
        return self._positions[dim]

    @cached_property
    def _variables(self) -> dict[str, dict[str, Variable]]:
        own = {table: {v.name: v for v in variables} for table, variables in self.user.items()}
        return {name: {**own.get(name, {}), **table.by_name} for name, table in TABLES.items()}

    @cached_property
    def _empty_rows(self) -> dict[tuple[Any, ...], NDArray[Any]]:
        return {}

    @cached_property
    def _positions(self) -> dict[str, dict[str, int]]:
        own = {dim: {label: at for at, label in enumerate(labels)} for dim, labels in self.labels.items()}
        return {**own, **{mirror: own[dim] for mirror, dim in MIRROR_DIMS.items()}}

    @cached_property
    def identity(self) -> int:
        """A checksum of the labels, by which journal records name the layout that they were written in."""
        return zlib.crc32(json.dumps([dict(self.labels), self.sketch_dim], sort_keys=True).encode())

    @property
    def extent(self) -> int:
        """Number of labels and user variables in all; of two layouts of one run the larger came later."""
        return sum(map(len, self.labels.values())) + sum(map(len, self.user.values())) + (self.sketch_dim > 0)

    def with_labels(self, dim: str, names: Iterable[str]) -> Layout:
        """Returns the layout with further labels at the end of a dim other than `slot`."""
        own = tuple(names)
        if own == self.labels[dim]:  # the usual case
            return self
        extended = tuple(dict.fromkeys((*self.labels[dim], *own)))
        if extended == self.labels[dim]:
            return self
        return replace(self, labels={**self.labels, dim: extended})

    def with_slots(self, slots: Mapping[str, str], policies: Mapping[str, str]) -> Layout:
        """Returns the layout with further slots, and the roles and policies that they bring."""
        new = [slot for slot in slots if slot not in self.index("slot")]
        layout = self.with_labels("role", (slots[slot] for slot in new))
        layout = layout.with_labels("contributor", (slots[slot] for slot in new))
        layout = layout.with_labels("policy", (policies[slot] for slot in new)).with_labels("slot", new)
        return replace(
            layout,
            slot_role=self.slot_role + tuple(slots[slot] for slot in new),
            slot_policy=self.slot_policy + tuple(policies[slot] for slot in new),
        )

    def with_sketch(self, sketch_dim: int) -> Layout:
        """Returns the layout with the length of sketches fixed."""
        return replace(self, sketch_dim=sketch_dim)

    def with_user(self, table: str, variable: Variable) -> Layout:
        """Returns the layout with one more variable of the user's own."""
        return replace(self, user={**self.user, table: (*self.user[table], variable)})

    def to_json(self) -> str:
        """Returns the layout as one JSON object."""
        user = {
            table: [[v.name, v.dims, v.dtype, v.long_name] for v in variables]
            for table, variables in self.user.items()
        }
        own = {"labels": self.labels, "slot_role": self.slot_role, "slot_policy": self.slot_policy}
        return json.dumps({**own, "user": user, "sketch_dim": self.sketch_dim, "identity": self.identity})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Rebuilds a layout from what `to_json` wrote, parsed."""
        labels = {dim: tuple(value["labels"].get(dim, ())) for dim in LABELS}
        user = {
            table: tuple(
                user_variable(name, tuple(dims), dtype, long_name)
                for name, dims, dtype, long_name in value["user"].get(table, ())
            )
            for table in USER_TABLES
        }
        return cls(labels, tuple(value["slot_role"]), tuple(value["slot_policy"]), user, value["sketch_dim"])


def user_variable(name: str, dims: tuple[str, ...], dtype: str, long_name: str) -> Variable:
    """Returns the description of a variable that the caller logs under a name of their own."""
    return Variable(name, dims, dtype, "1" if dtype != "str" else "", long_name)


def module_layer(module: str) -> int:
    """Returns the first whole number among the parts of a module's name; -1 when there is none."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return int(match.group(1)) if match else -1


def policy_of_slots(slots: Mapping[str, str], policies: Mapping[str, str]) -> dict[str, str]:
    """Returns slot to policy from a map whose keys are roles or slots.

    Raises:
        SchemaError: A slot has no policy, there are no slots, or a name is no text that a file can hold.
        UnknownNameError: A key is neither slot nor role.
    """
    if not slots:
        raise SchemaError("slots: empty; expected slot to role, such as {'generator/0': 'generator'}.")
    named = {"slot": slots, "role": slots.values(), "policies:": policies, "policy": policies.values()}
    for kind, names in named.items():
        for name in names:
            _check_name(kind, name)
    allowed = list(dict.fromkeys([*slots.values(), *slots]))
    for key in policies:
        if key not in allowed:
            raise unknown_name("role or slot", key, allowed, where="policies")
    for slot, role in slots.items():
        if slot not in policies and role not in policies:
            raise SchemaError(
                f"policies: neither slot '{slot}' nor its role '{role}' has a policy, only "
                f"{', '.join(policies) or 'nothing'} has. Add '{role}': NAME."
            )
    return {slot: policies.get(slot, policies.get(role, "")) for slot, role in slots.items()}


def _check_name(kind: str, name: object) -> None:
    """Checks that a file can hold a name.

    Raises:
        SchemaError: It cannot.
    """
    if not isinstance(name, str):
        raise SchemaError(
            f"{kind} {name!r}: a name must be a text, not {type(name).__name__}. Spell it as one."
        )
    if not name or "\0" in name or any("\ud800" <= sign <= "\udfff" for sign in name):
        raise SchemaError(
            f"{kind} {name!a}: a name must not be empty or hold NUL or half of a surrogate pair. Rename it."
        )
