"""Turns what a training loop hands in into rows of tables.

Nothing here raises for data: what does not fit is kept under `/user` or left out, and a notice says so once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradscope.errors import nearest
from gradscope.runfile.batch import Batch
from gradscope.runfile.columns import Placed, Row, columns_of, entries, number, text
from gradscope.runfile.layout import Layout, user_variable
from gradscope.runfile.update import UpdateRecord, minibatches
from gradscope.schema import (
    EXTRA_CONTRIBUTORS,
    LABEL_DIMS,
    MIRROR_DIMS,
    NUMBERED_DIMS,
    TABLES,
    Variable,
    base_dim,
)

KEPT_AS_USER = "is not in the schema; it is kept as /user/"
"""Words of the warning of a name of the caller's own, for those who silence it."""
_LOGGED_DIMS = ("slot", "role", "phase", "module")
_RESERVED = {*LABEL_DIMS, *MIRROR_DIMS, *NUMBERED_DIMS, *(table.dim for table in TABLES.values())}
_SET_BY_WRITER = {"update", "step", "segment", "policy"}


class Intake:
    """Knows the layout as it grows and turns one step's input into a batch.

    Args:
        layout: Labels at the start.
        policies: Role or slot to policy, for slots that turn up later.

    Attributes:
        layout: Labels now.
        notices: Sentences to warn with, each once a run; whoever shows them empties the list.
    """

    def __init__(self, layout: Layout, policies: Mapping[str, str]) -> None:
        self.layout = layout
        self.notices: list[str] = []
        self._policies = policies
        self._said: set[str] = set()

    def step(
        self, row: Row, records: Sequence[UpdateRecord], metrics: Mapping[str, Any], *, next_update: int
    ) -> Batch:
        """Returns the rows of one training step.

        Args:
            row: step, segment and what else the writer knows of the step.
            records: The step's updates.
            metrics: As given to `RunWriter.append`.
            next_update: Running number of the first update.
        """
        user: Row = {}
        updates: list[Row] = []
        user_updates: list[Row] = []
        for order, (record, before) in enumerate(zip(records, minibatches(records), strict=True)):
            own: Row = {}
            place = {"update": next_update + order, "step": row["step"], "segment": row["segment"]}
            updates.append({"minibatch": before, **self._update(record, own), **place})
            if own:
                user_updates.append({**own, "update": place["update"]})
        for name, value in metrics.items():
            self._metric(str(name), value, row, updates, user)
        tables: dict[str, list[Row]] = {"train": [row], "updates": updates, "user_updates": user_updates}
        if user:
            tables["user"] = [{**user, "step": row["step"]}]
        return self.batch(tables)

    def batch(self, tables: Mapping[str, list[Row]]) -> Batch:
        """Returns rows given one by one as columns, in the present layout."""
        return {
            table: columns_of(table, rows, self.layout, self.notice) for table, rows in tables.items() if rows
        }

    def notice(self, key: str, sentence: str) -> None:
        """Notes a sentence to warn with, unless one of that key has been noted in this run."""
        if key not in self._said:
            self._said.add(key)
            self.notices.append(sentence)

    def module_columns(
        self,
        slots: Sequence[str],
        modules: Sequence[str],
        contributors: Sequence[str],
        arrays: Mapping[str, Any],
    ) -> Row:
        """Returns what one row of `/modules` holds; arrays by name, their axes as the schema says."""
        self._learn_slots(slots)
        self.layout = self.layout.with_labels("module", modules).with_labels("contributor", contributors)
        labels = {"slot": slots, "module": modules, "contributor": contributors}
        row: Row = {}
        for name, value in arrays.items():
            variable = TABLES["modules"].variable(name)
            if variable is not None:
                self._place(row, variable, value, tuple(labels[base_dim(dim)] for dim in variable.dims[1:]))
        return row

    def role_columns(self, by_role: Mapping[str, Any]) -> Row:
        """Returns numbers by role, by name, with the roles learned."""
        row: Row = {}
        for name, values in by_role.items():
            if isinstance(values, Mapping):
                row[name] = {text(role): value for role, value in values.items()}
                self.layout = self.layout.with_labels("role", row[name])
            else:
                self.notice(name, f"'{name}' is no mapping by role and is left out.")
        return row

    def completion_rows(self, num: int, columns: Mapping[str, Any]) -> list[Row]:
        """Returns `num` rows of `/rows` from columns, each `[num]` long or None."""
        rows: list[Row] = [{} for _ in range(num)]
        for name, values in columns.items():
            if values is None:
                continue
            found = entries(values)
            if found is None or len(found) != num:
                what = "is no sequence" if found is None else f"has {len(found)} entries"
                self.notice(f"rows {name}", f"'{name}' {what} for {num} rows; left out.")
                continue
            for row, value in zip(rows, found, strict=True):
                row[name] = value
        return rows

    def add_sketches(self, rows: Sequence[Row], sketches: Sequence[Sequence[float]]) -> None:
        """Adds the rows' sketches, `[n, S]`; the first ones logged fix S."""
        try:
            values = np.asarray(sketches, dtype=np.float32)
        except (TypeError, ValueError) as error:
            self.notice("sketch", f"'sketch' is no array of numbers ({error}) and is left out.")
            return
        if self.layout.sketch_dim == 0 and values.ndim == 2 and values.shape[1]:
            self.layout = self.layout.with_sketch(values.shape[1])
        expected = (len(rows), self.layout.sketch_dim)
        if values.shape != expected:
            self.notice("sketch", f"'sketch' has shape {values.shape}, expected {expected}; it is left out.")
            return
        for row, value in zip(rows, values, strict=True):
            row["sketch"] = value

    def _update(self, record: UpdateRecord, user: Row) -> Row:
        """Returns the row of one update; what the schema does not know goes into `user`."""
        slots = record.slots
        self._learn_slots(slots, hint=record.policy)
        self.layout = self.layout.with_labels("policy", [record.policy])
        row: Row = {"policy": record.policy}
        for name, value in record.scalars.items():
            variable = TABLES["updates"].variable(name)
            if variable is None or variable.dims != ("update",) or name in _SET_BY_WRITER:
                self._keep("user_updates", name, value, user)
            else:
                row[name] = value
        for name, counts in record.counts.items():
            variable = TABLES["updates"].variable(name)
            if variable is not None and variable.dims == ("update", "slot"):
                self._place(row, variable, counts, (slots,))
            else:
                own = entries(counts)
                by_slot = counts if own is None else dict(zip(slots, own, strict=False))
                self._keep("user_updates", name, by_slot, user)
        if record.attribution_residual is not None:
            row["attribution_residual"] = record.attribution_residual
        role_of = dict(zip(self.layout.labels["slot"], self.layout.slot_role, strict=True))
        roles = tuple(dict.fromkeys(role_of[slot] for slot in slots))
        contributors = roles + EXTRA_CONTRIBUTORS
        axes: dict[str, tuple[Sequence[str], ...]] = {
            "gram": (slots, slots),
            "gram_cross": (slots, slots),
            "update_gram": (contributors, contributors),
            "effect": (roles, contributors),
            "influence": (slots, contributors),
        }
        for name, labels in axes.items():
            variable = TABLES["updates"].variable(name)
            if variable is not None and getattr(record, name) is not None:
                self._place(row, variable, getattr(record, name), labels)
        return row

    def _place(self, row: Row, variable: Variable, value: Any, labels: tuple[Sequence[str], ...]) -> None:
        try:
            values = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            self.notice(variable.name, f"'{variable.name}' is no array of numbers ({error}) and is left out.")
            return
        expected = tuple(len(axis) for axis in labels)
        if values.shape != expected:
            self.notice(
                variable.name,
                f"'{variable.name}' has shape {values.shape}, expected {expected} for {variable.dims[1:]}; "
                "it is left out.",
            )
            return
        row[variable.name] = Placed(labels, values)

    def _learn_slots(self, slots: Sequence[str], *, hint: str = "") -> None:
        new = {slot: slot.split("/")[0] for slot in slots if slot not in self.layout.index("slot")}
        if new:
            known = dict(zip(self.layout.slot_role, self.layout.slot_policy, strict=True))
            policies = {
                slot: self._policies.get(slot) or self._policies.get(role) or hint or known.get(role, "")
                for slot, role in new.items()
            }
            self.layout = self.layout.with_slots(new, policies)

    def _metric(self, name: str, value: Any, row: Row, updates: list[Row], user: Row) -> None:
        variable = TABLES["train"].variable(name)
        if variable is not None and name not in _SET_BY_WRITER and self._fits(variable, value):
            row[name] = value
        elif not self._to_updates(name, value, updates):
            self._keep("user", name, value, user)

    def _fits(self, variable: Variable, value: Any) -> bool:
        if len(variable.dims) == 1:
            return number(value) is not None
        if not isinstance(value, Mapping):
            return False
        if value.keys() <= self.layout.index(variable.dims[1]).keys():
            return True
        if not all(key == text(key) for key in value):
            return False
        if variable.dims[1] == "phase":
            self.layout = self.layout.with_labels("phase", value)
            return True
        new = [key for key in value if key not in self.layout.index("slot")]
        roles = self.layout.index("role")
        if any("/" not in key or key.split("/")[0] not in roles for key in new):
            return False
        self._learn_slots(new)
        return True

    def _to_updates(self, name: str, value: Any, updates: list[Row]) -> bool:
        """Puts a number of `/updates`, logged beside the records, where it belongs; says whether it could."""
        variable = TABLES["updates"].variable(name)
        if variable is None or variable.dims != ("update",) or name in _SET_BY_WRITER or not updates:
            return False
        if isinstance(value, Mapping):
            if not set(value) <= {update["policy"] for update in updates}:
                return False
        else:
            value = {update["policy"]: value for update in updates}
        for update in updates:
            found = number(value.get(update["policy"]))
            if found is not None:
                update.setdefault(name, found)
        return True

    def _keep(self, table: str, name: str, value: Any, row: Row) -> None:
        """Keeps a value under a name of the caller's own; None is missing."""
        if value is None:
            return
        if isinstance(value, Mapping):
            dim = next(
                (dim for dim in _LOGGED_DIMS if value and set(value) <= set(self.layout.index(dim))), ""
            )
            if not dim:
                for key, inner in value.items():
                    self._keep(table, f"{name}.{key}", inner, row)
                return
            dims: tuple[str, ...] = (TABLES[table].dim, dim)
        else:
            dims = (TABLES[table].dim,)
        is_number = isinstance(value, Mapping) or number(value) is not None
        variable = self._user_variable(table, name, dims, "f8" if is_number else "str")
        if variable is not None:
            row[variable.name] = value if is_number else str(value)

    def _user_variable(self, table: str, name: str, dims: tuple[str, ...], dtype: str) -> Variable | None:
        stored = text(name).replace("/", ".").strip(". ") or "unnamed"
        other = next(user for user in self.layout.user if user != table)
        if stored in _RESERVED or self.layout.variable(other, stored):
            stored += "_of_" + TABLES[table].dim
        known = self.layout.variable(table, stored)
        if known is None:
            known = user_variable(stored, dims, dtype, text(name))
            self.layout = self.layout.with_user(table, known)
            schema_names = [v.name for group in ("train", "updates") for v in TABLES[group].variables]
            hint = nearest(name, schema_names)
            self.notice(name, f"'{name}' {KEPT_AS_USER}{stored}.{hint}")
        if known.dims != dims or (known.dtype == "f8" and dtype == "str"):
            self.notice(
                f"{name} changed",
                f"'{name}' was logged as {known.dtype} over {known.dims} before, now as {dtype} over {dims}; "
                "values of the new kind are left out.",
            )
            return None
        if known.dtype != dtype:
            self.notice(f"{name} text", f"'{name}' was logged as text first; numbers are kept as text too.")
        return known
