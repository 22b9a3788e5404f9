"""Dialects: what the keys of each framework's logs mean, whatever file they stand in.

A dialect is a function that returns a `Dialect`. Where nobody names one, the dialect that knows most keys of
a log is taken, the first of several.
"""

from __future__ import annotations

from gradscope.registry import Registry

DIALECTS = Registry(
    "dialect",
    {
        name: f"gradscope.importers.dialects.{name}:dialect"
        for name in (
            "own", "trl", "verl", "dr_mas", "study", "rllm", "pettingllms", "marti", "openrlhf",
            "evaluations", "plain",
        )
    },
)  # fmt: skip
