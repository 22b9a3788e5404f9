"""What a probe measures: policies with their parameters, and what covers each of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

Mode = Literal["auto", "observe", "fused", "pure"]
Kind = Literal["linear", "transposed", "embedding", "affine", "lora_embedding", "bypassed"]


@dataclass(frozen=True)
class Policy:
    """The parameters of one policy.

    Attributes:
        name: Adapter name, or `default` for a model without adapters.
        slots: Indices of the slots routed to it.
        covered: Parameter name -> parameter, for all that is covered.
        uncovered: Parameter name -> parameter, for the trainable rest.
    """

    name: str
    slots: tuple[int, ...]
    covered: dict[str, nn.Parameter]
    uncovered: dict[str, nn.Parameter]


@dataclass(frozen=True)
class RootMeanSquare:
    """A norm that is w x / sqrt(mean x^2 + eps) over the last axis.

    Attributes:
        eps: As above.
        dtypes: Types of x for which it was found so: to the last bit, or from float32 on within rounding.
    """

    eps: float
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True)
class Affine:
    """How the output of a norm depends on its parameters.

    Attributes:
        shifts: Parameters that are added to the output; the others scale it.
        vanishes: Whether the output is zero when all parameters are.
        formula: What it does with its input, where that is known.
    """

    shifts: frozenset[str]
    vanishes: bool
    formula: RootMeanSquare | None = None


@dataclass(frozen=True)
class Claim:
    """What covers some parameters of a module.

    Attributes:
        kind: How; `bypassed` says that no tap inside would see anything, so that hooks are needed.
        parameters: What is covered, by its name in the module, whatever `requires_grad` says.
        inside: Modules within it that must have no claim of their own.
        affine: How a norm depends on its parameters.
    """

    kind: Kind
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    inside: tuple[nn.Module, ...] = ()
    affine: Affine | None = None


@dataclass(frozen=True)
class Target:
    """One module to tap.

    Attributes:
        name: Its name in the model.
        module: The module.
        claim: How it is covered.
        parameters: Those that are covered, by their name in the module.
        policies: The policy of each of them.
    """

    name: str
    module: nn.Module
    claim: Claim
    parameters: dict[str, nn.Parameter]
    policies: dict[str, str]

    @property
    def policy(self) -> str:
        """The policy of its parameters, where there is only one."""
        (policy,) = set(self.policies.values())
        return policy


@dataclass(frozen=True)
class Hooked:
    """One parameter that is covered by a hook of its own.

    Attributes:
        name: Its name in the model.
        parameter: The parameter.
        policy: Its policy.
        reason: Why no tap covers it.
    """

    name: str
    parameter: nn.Parameter
    policy: str
    reason: str


@dataclass(frozen=True)
class Layout:
    """What a probe will measure.

    Attributes:
        mode: How.
        policies: The policies by name.
        targets: Modules to tap.
        hooked: Parameters with a hook of their own.
        reasons: Why a parameter is not covered.
    """

    mode: Mode
    policies: dict[str, Policy]
    targets: tuple[Target, ...]
    hooked: tuple[Hooked, ...]
    reasons: dict[str, str]
