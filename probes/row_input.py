"""Checks what a loop says about the rows of a micro-batch, and turns names into numbers.

Legend: N rows (tokens when packed).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from gradscope.errors import ProbeError, nearest
from gradscope.probes.rows import UNTAGGED, RowBatch


def read_rows(
    slot_of_each_row: Sequence[str | None],
    slot_index: Mapping[str, int],
    *,
    problems: Sequence[Hashable] | None,
    row_ids: Sequence[Hashable] | None,
    numbers: Mapping[str, Sequence[float] | None],
    packed: bool | None = None,
    labels: Sequence[str | None] | None = None,
    known_labels: Sequence[str] = (),
    half_of: Callable[[int, Hashable], int] | None = None,
) -> RowBatch:
    """Returns the checked rows of one micro-batch.

    Args:
        slot_of_each_row: Slot names.
        slot_index: Slot -> index.
        problems: Problem of each row, None for a row whose problem is not known.
        row_ids: Name of each row.
        numbers: Per-row numbers by name.
        packed: Whether an entry stands for a token.
        labels: Label of each row.
        known_labels: The declared labels.
        half_of: Half of a problem for a slot; needed with problems.

    Raises:
        ProbeError: An unknown slot or label, no rows, or a sequence that has not one entry for each row.
    """
    if isinstance(slot_of_each_row, str):
        raise ProbeError(
            f"rows(): got the single string '{slot_of_each_row}'; give a list with one slot name for each "
            "row."
        )
    names = list(slot_of_each_row)
    if not names:
        raise ProbeError("rows(): got no rows; give one slot name for each row of the micro-batch.")
    try:
        slot_N = [UNTAGGED if name is None else slot_index[name] for name in names]
    except KeyError as error:
        name = str(error.args[0])
        raise ProbeError(
            f"rows(): unknown slot '{name}'.{nearest(name, slot_index)} Allowed: {', '.join(slot_index)} (or "
            "None for a row of no slot, such as padding)."
        ) from None
    given: dict[str, Sequence[object] | None] = {
        "problems": problems,
        "row_ids": row_ids,
        "labels": labels,
        **numbers,
    }
    for label, values in given.items():
        if values is not None and len(values) != len(names):
            raise ProbeError(
                f"rows(): {label} has {len(values)} entries, slot_of_each_row has {len(names)}; give one for "
                "each row."
            )
    arrays = {
        label: np.asarray(values, dtype=np.float64) for label, values in numbers.items() if values is not None
    }
    half_N = None
    if problems is not None and half_of is not None:
        half_N = [
            None if problem is None or slot == UNTAGGED else half_of(slot, problem)
            for slot, problem in zip(slot_N, problems, strict=True)
        ]
    return RowBatch(
        slot_N,
        tuple(slot_index),
        half_N=half_N,
        label_N=_label_numbers(slot_N, labels, known_labels),
        num_labels=max(1, len(known_labels)),
        problems=problems,
        row_ids=row_ids,
        numbers=arrays,
        packed=packed,
    )


def _label_numbers(
    slot_N: Sequence[int], labels: Sequence[str | None] | None, known: Sequence[str]
) -> list[int] | None:
    if not known:
        if labels is not None:
            raise ProbeError("rows(): got labels, but none are declared; name them in attach(labels=...).")
        return None
    if labels is None:
        raise ProbeError(f"rows(): labels {', '.join(known)} are declared; give one for each row.")
    number = {label: place for place, label in enumerate(known)}
    numbers = []
    for slot, label in zip(slot_N, labels, strict=True):
        if slot != UNTAGGED and label not in number:
            raise ProbeError(
                f"rows(): unknown label '{label}'.{nearest(str(label), known)} Allowed: {', '.join(known)}."
            )
        numbers.append(number.get(str(label), 0))
    return numbers
