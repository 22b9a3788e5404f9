"""How many CPU threads torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(num: int) -> Iterator[None]:
    """Uses that many CPU threads inside the block; 0 leaves torch's choice."""
    before = torch.get_num_threads()
    if num:
        torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
