"""Cells, the finest parts of an update that are summed apart, and the Grams of slots read off theirs.

A cell holds the rows of one slot, of one half of the update's problems (where problems are given) and of one
label (where labels are declared). A slot's gradient is the sum of its cells.

Legend: K slots of the policy, L labels (1 where none are declared), H halves (1 or 2), C = H K L cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradscope.errors import ProbeError

Array = NDArray[np.float64]

MAX_SLOT_LABELS = 32
"""Largest number of slots x labels."""


@dataclass(frozen=True)
class Cells:
    """The cells of one policy, halves outermost, labels innermost.

    Attributes:
        slots: Indices of the policy's slots among all.
        num_slots: Number of all slots.
        num_labels: L.
        num_halves: H.
    """

    slots: tuple[int, ...]
    num_slots: int
    num_labels: int = 1
    num_halves: int = 1

    def __len__(self) -> int:
        return self.num_halves * len(self.slots) * self.num_labels

    @cached_property
    def local(self) -> dict[int, int]:
        """Code of a cell among those of all slots (`cell_code`) -> place among the policy's."""
        codes = (
            cell_code(half, slot, label, num_slots=self.num_slots, num_labels=self.num_labels)
            for half in range(self.num_halves)
            for slot in self.slots
            for label in range(self.num_labels)
        )
        return {code: place for place, code in enumerate(codes)}

    def of_slot(self, slot: int) -> list[int]:
        """Returns the places of the cells of a slot, counted within the policy."""
        places = np.arange(len(self)).reshape(self.num_halves, len(self.slots), self.num_labels)
        return [int(place) for place in places[:, slot].flatten()]

    def parts(self, part_of_slot: Sequence[int]) -> NDArray[np.int64]:
        """Returns which part each cell belongs to, `[C]`, from the part of each slot, `[K]`."""
        return np.tile(np.repeat(np.asarray(part_of_slot), self.num_labels), self.num_halves)

    def halved(self) -> Cells:
        """Returns the same cells, each divided by halves."""
        return replace(self, num_halves=2)

    def gram(self, cell_gram: Array) -> Array:
        """Returns the products of the slots, `[K, K]`, from those of the cells, `[C, C]`."""
        result: Array = self._split(cell_gram).sum(axis=(0, 2, 3, 5))
        return result

    def label_gram(self, cell_gram: Array) -> Array:
        """Returns the products of slots x labels, `[K, L, K, L]`."""
        result: Array = self._split(cell_gram).sum(axis=(0, 3))
        return result

    def cross_gram(self, cell_gram: Array, rows: NDArray[np.int64]) -> Array:
        """Returns C_kl = <g_k^a, g_l^b> + <g_k^b, g_l^a>, `[K, K]`; NaN where no two rows are such a pair.

        Args:
            cell_gram: Products of the cells, `[C, C]`, of two halves.
            rows: Number of rows of each cell, `[C]`.
        """
        by_half = self._split(cell_gram).sum(axis=(2, 5))
        products: Array = by_half[0, :, 1] + by_half[1, :, 0]
        in_a, in_b = rows.reshape(2, len(self.slots), self.num_labels).sum(-1) > 0
        there = np.outer(in_a, in_b)
        return np.where(there | there.T, products, np.nan)

    def _split(self, cell_gram: Array) -> Array:
        axes = (self.num_halves, len(self.slots), self.num_labels)
        return cell_gram.reshape(*axes, *axes)


def cell_code(half: int, slot: int, label: int, *, num_slots: int, num_labels: int) -> int:
    """Returns the number of a cell among those of all slots."""
    return (half * num_slots + slot) * num_labels + label


def check_labels(labels: Iterable[str], num_slots: int) -> tuple[str, ...]:
    """Returns the labels that `attach` was given.

    Raises:
        ProbeError: A label stands twice, or there are more than `MAX_SLOT_LABELS` slots x labels.
    """
    if isinstance(labels, str):
        raise ProbeError(f"attach(): labels is the single string '{labels}'; give a sequence of labels.")
    found = tuple(labels)
    twice = [label for place, label in enumerate(found) if label in found[:place]]
    if twice:
        raise ProbeError(f"attach(): labels has '{twice[0]}' twice; give each label once.")
    if found and num_slots * len(found) > MAX_SLOT_LABELS:
        raise ProbeError(
            f"attach(): {num_slots} slots x {len(found)} labels are {num_slots * len(found)}, allowed are "
            f"{MAX_SLOT_LABELS}; each is one more copy of the gradient. Declare fewer labels."
        )
    return found
