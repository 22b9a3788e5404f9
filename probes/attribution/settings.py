"""How applied changes are attributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gradscope.errors import ProbeError

By = Literal["role", "slot"]
Precision = Literal["parameter", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Settings of the attribution of applied changes.

    Attributes:
        enabled: Whether changes are attributed. It holds one momentum for each role, and the parameters
            before the step.
        by: Whose momenta are kept: one for each role, or one for each slot.
        precision: What they are kept in: what the parameter has, at least float32, or bfloat16, which halves
            their memory and makes contributions exact to three digits only.
    """

    enabled: bool = True
    by: By = "role"
    precision: Precision = "parameter"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("by", self.by, get_args(By)),
            ("precision", self.precision, get_args(Precision)),
        ):
            if value not in allowed:
                raise ProbeError(f"Attribution({name}={value!r}): allowed are {', '.join(allowed)}.")
