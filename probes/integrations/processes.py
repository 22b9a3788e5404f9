"""Lists of all processes of a training, joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

Item = TypeVar("Item")


def joined(items: Sequence[Item]) -> list[Item]:
    """Returns the items of all processes in the order of their ranks; each process must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(items)
    parts: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, list(items))
    return [item for part in parts for item in part]
