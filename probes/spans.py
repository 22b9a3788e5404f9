"""The sums of one layer's parameters as one tensor, where they lie side by side.

Legend: C cells (`gradscope.probes.cells`), n numbers of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """The sums of one layer's parameters; a named tuple, since one is looked at for each layer and pass.

    Attributes:
        parts: Those of each parameter, `[C, *shape]`.
        whole: All of them beside each other, `[C, n]`; None where they do not lie side by side.
    """

    parts: tuple[torch.Tensor, ...]
    whole: torch.Tensor | None


def span_of(parts: Sequence[torch.Tensor]) -> Span:
    """Returns the sums of a layer from those of its parameters, each `[C, *shape]`."""
    first, start = parts[0], parts[0].storage_offset()
    stop = start
    for part in parts:
        if (
            part.storage_offset() != stop
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return Span(tuple(parts), None)
        stop += part[0].numel()
    return Span(tuple(parts), first.as_strided((len(first), stop - start), (first.stride(0), 1), start))
