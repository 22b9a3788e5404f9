"""Decides for each module what covers its parameters: a tap, a fused node, or hooks on the parameters.

A mode lists functions that may claim a module, the first that does has it. A claim names the parameters it
covers and the modules inside that need no claim of their own. Parameters that nobody claims get hooks where
the mode allows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gradscope.probes.taps import lora_embedding
from gradscope.probes.taps.norms import read_affine
from gradscope.probes.targets import Claim, Mode

_NORM = "Norm"
"""End of the class names of norms, torch's and transformers'."""

_BYPASSED = ("ParamWrapper", "MultiheadAttention")
"""Classes of PEFT that read the weights of the layers inside them without calling those."""


Claimer = Callable[[nn.Module], Claim | None]


def claim_for_tap(module: nn.Module) -> Claim | None:
    """Returns how row segmentation covers a module beside autograd; None where it does not know it."""
    cls = type(module)
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if cls.__module__.startswith("peft.") and cls.__name__ in _BYPASSED:
        return Claim("bypassed", inside=_adapter_layers(module))
    if adapters := lora_embedding.plain_adapters(module):
        parts = {part: getattr(module, part) for part in (lora_embedding.A, lora_embedding.B)}
        matrices = {f"{name}.{key}": held[key] for name, held in parts.items() for key in adapters}
        return Claim("lora_embedding", matrices, tuple(parts.values()))
    if not own:
        return None
    if cls.forward is nn.Linear.forward and not isinstance(module, NonDynamicallyQuantizableLinear):
        return Claim("linear", own)
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return Claim("transposed", own)
    if isinstance(module, nn.Embedding) and cls.forward is nn.Embedding.forward:
        plain = not module.sparse and not module.scale_grad_by_freq and module.max_norm is None
        return Claim("embedding", own) if plain else None
    is_leaf = next(module.children(), None) is None
    if is_leaf and cls.__name__.endswith(_NORM) and (affine := read_affine(module)) is not None:
        return Claim("affine", own, affine=affine)
    return None


@dataclass(frozen=True)
class ModePlan:
    """What a mode may use.

    Attributes:
        claimers: Functions that may claim a module, in order.
        hooks: Whether parameters that nobody claims get hooks.
    """

    claimers: tuple[Claimer, ...]
    hooks: bool

    def claim(self, module: nn.Module) -> Claim | None:
        """Returns the first claim on a module."""
        return next((claim for claimer in self.claimers if (claim := claimer(module)) is not None), None)


MODES: dict[Mode, ModePlan] = {
    "auto": ModePlan((claim_for_tap,), hooks=True),
    "observe": ModePlan((claim_for_tap,), hooks=False),
    "fused": ModePlan((claim_for_tap,), hooks=True),
    "pure": ModePlan((), hooks=True),
}


def _adapter_layers(module: nn.Module) -> tuple[nn.Module, ...]:
    held = (getattr(module, name, None) for name in ("lora_A", "lora_B"))
    return tuple(layer for part in held if isinstance(part, nn.ModuleDict) for layer in part.values())
