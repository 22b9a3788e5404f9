"""Sparse evidence beside the Gram matrix: modules, single rows, loss components, functional influence."""

from __future__ import annotations

from gradscope.probes.evidence.settings import Evidence

__all__ = ["Evidence"]
