"""What each contributor changed in the weights that LoRA layers add, and how those changes are aligned.

Legend: M contributors, S layers of one shape, r rank, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradscope.probes.evidence.applied import Applied
from gradscope.probes.evidence.changes import LowRank, products, weight_change
from gradscope.probes.evidence.modules import module_of
from gradscope.probes.targets import Policy

Array = NDArray[np.float64]

_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True)
class LoraLayer:
    """One adapter of one LoRA layer, `weight += scaling B A`.

    Attributes:
        module: Name of the layer in the base model.
        a: Name of A's parameter.
        b: Name of B's parameter.
        layer: The layer.
        adapter: Name of the adapter.
    """

    module: str
    a: str
    b: str
    layer: Any
    adapter: str

    @property
    def scaling(self) -> float:
        """The factor of the product now."""
        return float(self.layer.scaling[self.adapter])


def lora_layers(model: nn.Module, policy: Policy) -> list[LoraLayer]:
    """Returns the LoRA layers whose two matrices a policy trains; not variants such as DoRA."""
    names = {id(parameter): name for name, parameter in policy.covered.items()}
    found = []
    for layer in model.modules():
        variants: Any = getattr(layer, "lora_variant", {})
        for first, second in _PAIRS:
            held: Any = getattr(layer, first, None)
            others: Any = getattr(layer, second, None)
            if not isinstance(held, nn.ModuleDict | nn.ParameterDict) or others is None:
                continue
            for adapter in held:
                if adapter in variants:
                    continue
                # A linear layer holds modules, an embedding the matrices themselves.
                pair: tuple[Any, Any] = (held[adapter], others[adapter])
                a, b = (getattr(part, "weight", part) for part in pair)
                if id(a) in names and id(b) in names and a.dim() == b.dim() == 2:
                    found.append(
                        LoraLayer(module_of(names[id(a)]), names[id(a)], names[id(b)], layer, adapter)
                    )
    return found


@dataclass(frozen=True)
class WeightChanges:
    """Changes of the layers of one shape, by contributor.

    Attributes:
        modules: Names of the layers, `[S]`.
        changes: Contributor -> its change in each of them, `[S, ...]`.
    """

    modules: tuple[str, ...]
    changes: dict[str, LowRank]


def weight_changes(layers: Sequence[LoraLayer], applied: Applied) -> list[WeightChanges]:
    """Returns what a step changed in LoRA layers, in groups of layers of one shape."""
    groups: dict[tuple[torch.Size, torch.Size], list[LoraLayer]] = {}
    for layer in layers:
        shapes = (applied.parameters[layer.a].shape, applied.parameters[layer.b].shape)
        groups.setdefault(shapes, []).append(layer)
    return [_of_one_shape(alike, applied) for alike in groups.values()]


def change_grams(own: Sequence[WeightChanges], others: Sequence[WeightChanges]) -> dict[str, Array]:
    """Returns inner products of changes by module, each `[M, M]`.

    Args:
        own: Changes of one policy, whose contributors come first.
        others: Changes of other policies in the same modules, by names that the own ones do not have.
    """
    found: dict[str, torch.Tensor] = {}
    own_names, other_names = contributors(own), contributors(others)
    place_of = {
        (module, name): (group.changes[name], at)
        for group in others
        for at, module in enumerate(group.modules)
        for name in group.changes
    }
    for group in own:
        # Other policies' adapters may have other ranks, but then all in the same way.
        beside = {
            name: [place_of[module, name] for module in group.modules]
            for name in other_names
            if all((module, name) in place_of for module in group.modules)
        }
        changes = [group.changes[name] for name in own_names]
        changes += [
            LowRank(
                torch.stack([change.left[at] for change, at in parts]),
                torch.stack([change.right[at] for change, at in parts]),
            )
            for parts in beside.values()
        ]
        names = (*own_names, *other_names)
        places = torch.tensor([names.index(name) for name in (*own_names, *beside)])
        grams_SMM = torch.full((len(group.modules), len(names), len(names)), torch.nan, dtype=torch.float64)
        grams_SMM[:, places[:, None], places] = products(changes).cpu()
        found |= dict(zip(group.modules, grams_SMM, strict=True))
    return {module: gram.numpy() for module, gram in found.items()}


def contributors(groups: Sequence[WeightChanges]) -> tuple[str, ...]:
    """Returns the contributors to changes."""
    return tuple(dict.fromkeys(name for group in groups for name in group.changes))


def _of_one_shape(layers: Sequence[LoraLayer], applied: Applied) -> WeightChanges:
    def stacked(names: Sequence[str], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shape = applied.parameters[names[0]].shape
        return torch.stack([values[name].view(*values[name].shape[:-1], *shape) for name in names])

    names_a, names_b = [layer.a for layer in layers], [layer.b for layer in layers]
    a_SrI, b_SOr = stacked(names_a, applied.before), stacked(names_b, applied.before)
    da_SMrI, db_SMOr = stacked(names_a, applied.changes), stacked(names_b, applied.changes)
    scaling_S = torch.tensor([layer.scaling for layer in layers], dtype=a_SrI.dtype, device=a_SrI.device)
    return WeightChanges(
        tuple(layer.module for layer in layers),
        {
            name: weight_change(
                a_SrI, b_SOr, da_SMrI[:, at], db_SMOr[:, at], scaling=scaling_S[:, None, None]
            )
            for at, name in enumerate(applied.contributors)
        },
    )
