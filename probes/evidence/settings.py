"""What is looked at besides the Gram matrix, and how often."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gradscope.errors import ProbeError


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Schedules, each in updates of one policy, the first one included; 0 is never.

    Attributes:
        modules_every: Between updates whose gradients are told apart by module. An update whose gradient norm
            jumps above its own recent history is added.
        module_gram: Whether modules get the products of slots beside their norms.
        rows_every: Between updates of which every row's gradient norm and sketch is taken; the update after a
            jump of the gradient norm is added. Rows need `row_ids`.
        top_rows: Rows of the largest gradient norms that every update keeps; 0 looks at scheduled updates
            only.
        sketch_dim: Numbers of a sketch, 0 for norms alone. An inner product read off two sketches is unbiased
            with a standard error of about |a| |b| / sqrt(sketch_dim).
        sketch_seed: Seed of the projection; sketches of one seed and size can be compared across runs.
        components_every: Between updates of which `scope.evidence.components` measures the parts of the loss.
        influence_every: Between updates after which `scope.evidence.influence` can be asked.
    """

    modules_every: int = 25
    module_gram: bool = False
    rows_every: int = 0
    top_rows: int = 0
    sketch_dim: int = 256
    sketch_seed: int = 0
    components_every: int = 1
    influence_every: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "module_gram" and (isinstance(value, bool) or int(value) != value or value < 0):
                raise ProbeError(f"Evidence: {field.name} is {value!r}; give a whole number, 0 or larger.")


def is_due(every: int, num_updates: int) -> bool:
    """Returns whether the update after `num_updates` others is one of a schedule."""
    return every > 0 and num_updates % every == 0
