"""Reads the rows of verl's micro-batches, padded or packed.

Legend: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradscope.probes.integrations.examples import Rows, RowSource
from gradscope.probes.integrations.replies import Reply

REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")
"""Columns with the rewards of tokens, the first that is there."""


@dataclass(frozen=True)
class MicroBatch:
    """What is known of the rows of a micro-batch.

    Attributes:
        rows: Slot, problem and name of each row.
        lengths: Tokens of each row without padding.
        num_tokens: Scored tokens of each row.
        advantages: The advantage of each row: of its tokens' the largest in magnitude.
        replies: The completions of rows that have a slot.
    """

    rows: Rows
    lengths: list[int]
    num_tokens: list[float]
    advantages: list[float]
    replies: list[Reply]

    def padded(self) -> dict[str, Any]:
        """Returns what `Session.rows` takes where every row is a row of the model's input."""
        return {"rows": self.rows, "tokens": self.num_tokens, "advantages": self.advantages, "packed": False}

    def packed(self, padding: int) -> dict[str, Any]:
        """Returns what `Session.rows` takes where all rows are one row of tokens.

        A row's scored tokens are counted at its first.

        Args:
            padding: Tokens behind the last row, of no slot.
        """
        places = [place for place, length in enumerate(self.lengths) for _ in range(length)]
        starts = {sum(self.lengths[:place]) for place in range(len(self.lengths))}
        tokens = [self.num_tokens[place] if at in starts else 0.0 for at, place in enumerate(places)]
        taken = self.rows.take(places)
        unknown: list[Hashable] = [None] * padding
        return {
            "rows": Rows(
                [*taken.slots, *[None] * padding],
                None if taken.problems is None else [*taken.problems, *unknown],
                None if taken.row_ids is None else [*taken.row_ids, *unknown],
            ),
            "tokens": [*tokens, *[0.0] * padding],
            "advantages": [*(self.advantages[place] for place in places), *[0.0] * padding],
            "packed": True,
        }


def read_micro_batch(batch: Mapping[str, Any], source: RowSource, *, first_row: int) -> MicroBatch:
    """Returns the rows of a micro-batch.

    Args:
        batch: verl's micro-batch: a TensorDict, or a dictionary of tensors and arrays.
        source: Says where slots are found.
        first_row: Number of the first row, for the names of rows that have none.

    Raises:
        ProbeError: A column that is missing, or an unknown slot.
    """
    rows = source.read(_examples(batch))
    if rows.row_ids is None:
        rows = Rows(rows.slots, rows.problems, [first_row + place for place in range(len(rows.slots))])
    mask = _rows_of(batch["response_mask"])
    values = _rows_of(batch["advantages"])
    rewards = next((_rows_of(batch[name]) for name in REWARDS if name in batch), None)
    scored = [float(own.sum()) for own in mask]
    advantages = [_largest(value) for value in values]
    widest = max(len(own) for own in mask)
    replies = [
        Reply(
            slot,
            int(scored[place]),
            advantages[place],
            math.nan if rewards is None else float(rewards[place].sum()),
            scored[place] >= widest,
        )
        for place, slot in enumerate(rows.slots)
        if slot is not None
    ]
    return MicroBatch(rows, _lengths(batch), scored, advantages, replies)


def _examples(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of each row that are no tensors."""
    columns = {}
    for key in batch.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        value: Any = batch.get(key)
        if not isinstance(value, torch.Tensor) and hasattr(value, "tolist"):
            columns[key] = value.tolist()
    num_rows = len(_rows_of(batch["response_mask"]))
    columns = {
        key: value for key, value in columns.items() if isinstance(value, list) and len(value) == num_rows
    }
    return [{key: value[place] for key, value in columns.items()} for place in range(num_rows)]


def _rows_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the rows of a padded or nested tensor `[B, T]`, on the host."""
    return tensor.cpu().unbind()


def _lengths(batch: Mapping[str, Any]) -> list[int]:
    ids = batch["input_ids"]
    if ids.is_nested:
        lengths: list[int] = ids.offsets().diff().tolist()
    else:
        lengths = batch["attention_mask"].sum(1).tolist()
    return lengths


def _largest(values_T: torch.Tensor) -> float:
    return float(values_T[values_T.abs().argmax()]) if len(values_T) else 0.0
