"""Importers: each reads the log of another tool; together they make run files of them.

An importer is a class with `recognises(source)` and `read(source, settings)`, see `log.Importer`. How a log
is stored is one thing, what its keys mean another: that is the matter of a dialect, see `dialects`.
"""

from __future__ import annotations

from gradscope.registry import Registry

IMPORTERS = Registry(
    "importer",
    {
        "trl": "gradscope.importers.trl:Importer",
        "verl": "gradscope.importers.verl:Importer",
        "evaluations": "gradscope.importers.evaluations:Importer",
        "tensorboard": "gradscope.importers.tensorboard:Importer",
        "trackio": "gradscope.importers.trackio:Importer",
        "wandb": "gradscope.importers.wandb:Importer",
        "parquet": "gradscope.importers.parquet:Importer",
        "csv": "gradscope.importers.csv:Importer",
        "jsonl": "gradscope.importers.jsonl:Importer",
    },
)
