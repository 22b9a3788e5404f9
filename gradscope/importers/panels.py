"""CSV of W&B's panels: columns `RUN - KEY`, with `RUN - KEY__MIN` and `__MAX` beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.errors import DataError
from gradscope.importers.wording import listed

MARK = " - "
EXTREMES = ("__MIN", "__MAX")
NOTE = (
    "The columns are those of a panel of W&B's: run '{}' is taken off their names, and the extremes of each "
    "point are left out. Its Step counts log calls unless another x-axis was chosen there."
)


def without_run_names(
    table: Sequence[Mapping[str, Any]], names: Sequence[str], steps: Sequence[str], *, source: str
) -> tuple[list[dict[str, Any]], list[str], tuple[str, ...]]:
    """Returns rows and columns by the keys that were logged, and what to say of it; other tables as they are.

    Args:
        table: One mapping a row.
        names: Its columns.
        steps: Names that a column of steps may have.
        source: Where it is from, for messages.

    Raises:
        DataError: The columns are of several runs.
    """
    own = [name for name in names if name not in steps]
    if not own or not all(MARK in name for name in own):
        return [dict(row) for row in table], list(names), ()
    runs = list(dict.fromkeys(name.partition(MARK)[0] for name in own))
    if len(runs) > 1:
        raise DataError(
            f"{source}: holds columns of {len(runs)} runs of a panel of W&B's ({listed(runs)}). Leave those "
            "of one run."
        )
    # The panel's own counter of rows stands beside the axis that was chosen for it.
    kept = {
        name: name if name in steps else name.removeprefix(runs[0] + MARK)
        for name in names
        if not name.endswith(EXTREMES)
    }
    rows = [{kept[name]: value for name, value in row.items() if name in kept} for row in table]
    return rows, list(kept.values()), (NOTE.format(runs[0]),)
