"""What probes found out about modules, rows and loss components of one update, for the run file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ModuleEvidence:
    """One update, module by module. K is the number of slots, C of contributors, M of modules.

    Attributes:
        modules: Names of the modules.
        grad_norm: Norms of the slots' gradients in each module, `[K, M]`; NaN for slots without rows.
        gram: Inner products of the slots' gradients in each module, `[M, K, K]`; None when not taken.
        change_gram: Inner products of the changes s(dB A + B dA) that the contributors made in each module's
            weight, `[M, C, C]`; None when not taken.
        contributors: Names along C.
    """

    modules: tuple[str, ...]
    grad_norm: Array
    gram: Array | None = None
    change_gram: Array | None = None
    contributors: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowEvidence:
    """Rows of one update, one by one; all `[n]` long.

    Attributes:
        row_ids: Ids that lead to the completions.
        slots: Slots that wrote them.
        grad_norm: Norms of their gradients, as weighted in the loss; NaN where it cannot be had.
        sketch: Seeded projections of their gradients, `[n, S]`; None when not taken.
        problems: Ids of their problems; empty strings where not known.
        episodes: Ids of their episodes; empty strings where not known.
        advantages: Their advantages; NaN where not known.
        num_tokens: Their scored tokens; NaN where not known.
    """

    row_ids: tuple[str, ...]
    slots: tuple[str, ...]
    grad_norm: Array
    sketch: Array | None
    problems: tuple[str, ...]
    episodes: tuple[str, ...]
    advantages: Array
    num_tokens: Array


@dataclass(frozen=True)
class ComponentGram:
    """Products of the gradients of the parts of a loss.

    Attributes:
        components: Names of the parts.
        slots: Names of all slots.
        gram: Inner products of the gradients of components x slots, `[n, S, n, S]`; NaN for slots of other
            policies and without rows.
    """

    components: tuple[str, ...]
    slots: tuple[str, ...]
    gram: Array

    def by_slot(self) -> dict[str, Array]:
        """Returns what is stored, each `[S]`: norms `component_norm_A`, products `component_dot_A_B`."""
        found = {}
        for i, one in enumerate(self.components):
            found[f"component_norm_{one}"] = np.sqrt(np.maximum(np.diagonal(self.gram[i, :, i]), 0.0))
            for j in range(i):
                found[f"component_dot_{self.components[j]}_{one}"] = np.diagonal(self.gram[j, :, i]).copy()
        return found
