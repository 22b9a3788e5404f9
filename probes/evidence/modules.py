"""The products of slots module by module, read off the sums of an update in few kernels.

Legend: C cells and K slots of a policy, M modules, G parameters of one size, P their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope.probes.accumulators import Block, SlotAccumulators
from gradscope.runfile.evidence import ModuleEvidence
from gradscope.runfile.update import UpdateRecord

Array = NDArray[np.float64]

_ADAPTER_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Names under which PEFT keeps what belongs to the module above."""
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of names that wrappers around a model or layer add."""
NUMBERS = 1 << 24
"""Numbers turned into float64 at a time (128 MiB)."""


def module_of(parameter: str) -> str:
    """Returns the name of the module that a parameter trains, the same with and without adapter and DDP."""
    parts = name_in_model(parameter).removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:  # followed by the adapter's name
        at = parts.index("modules_to_save")
        parts = parts[:at] + parts[at + 2 :]
    own = next((at for at, part in enumerate(parts) if part in _ADAPTER_PARTS), len(parts) - 1)
    return ".".join(part for part in parts[:own] if part != "base_layer") or parts[0]


def name_in_model(parameter: str) -> str:
    """Returns a parameter's name as it is without data-parallel, compiling and checkpointing wrappers."""
    parts = parameter.removeprefix("module.").split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def module_evidence(sums: SlotAccumulators, record: UpdateRecord, *, whole: bool) -> ModuleEvidence:
    """Returns norms, and with `whole` products, of the slots in each module; NaN for slots without rows.

    Args:
        sums: The sums of an update.
        record: Its record.
        whole: Whether products are kept.
    """
    num_slots, places = len(record.slots), np.ix_(sums.policy.slots, sums.policy.slots)
    grams = module_grams(sums)
    found = np.full((len(grams), num_slots, num_slots), np.nan)
    for gram, own in zip(found, grams.values(), strict=True):
        gram[places] = own
    found[:, np.isnan(record.gram)] = np.nan
    norms = np.sqrt(np.maximum(np.diagonal(found, axis1=1, axis2=2), 0.0)).T
    return ModuleEvidence(tuple(grams), norms, found if whole else None)


def module_grams(sums: SlotAccumulators) -> dict[str, Array]:
    """Returns the products of the policy's slots in every module, each `[K, K]`, over all processes.

    They add up to the products of the update.
    """
    cells = sums.cells
    found: dict[str, Array] = {}
    for block in sums.local_blocks():
        own = sums.reduction.together(partial(_parameter_grams, block, _sizes(sums, block)))
        grams = sums.reduction.add_up(own).cpu().numpy()
        for name, gram in zip(block.names, grams, strict=True):
            module = module_of(name)
            found[module] = found.get(module, 0.0) + cells.gram(gram)
    return {module: found[module] for module in dict.fromkeys(map(module_of, sums.policy.covered))}


def _sizes(sums: SlotAccumulators, block: Block) -> list[int]:
    return [sums.reduction.local(sums.policy.covered[name]).numel() for name in block.names]


def _parameter_grams(block: Block, sizes: Sequence[int]) -> torch.Tensor:
    """Returns the products of the cells in every parameter of a block, float64, in its order, `[G, C, C]`."""
    num_cells = len(block.sums)
    grams = torch.zeros(len(sizes), num_cells, num_cells, dtype=torch.float64, device=block.sums.device)
    columns = block.sums.split(list(sizes), dim=1)
    for size in sorted(set(sizes) - {0}):
        alike = [place for place, own in enumerate(sizes) if own == size]
        for places in _portions(alike, num_cells * size):
            stacked_GCP = torch.stack([columns[place] for place in places])
            for start in range(0, size, max(1, NUMBERS // (len(places) * num_cells))):
                part = stacked_GCP[
                    :, :, start : start + max(1, NUMBERS // (len(places) * num_cells))
                ].double()
                grams[places] += part @ part.transpose(1, 2)
    return grams


def _portions(places: Sequence[int], numbers: int) -> Iterator[list[int]]:
    """Divides parameters of one size, `numbers` each, into as many as are looked at together."""
    length = max(1, NUMBERS // max(1, numbers))
    for start in range(0, len(places), length):
        yield list(places[start : start + length])
