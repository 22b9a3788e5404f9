"""Exporters: each writes scalars by step where another tool reads them, of a saved run or while one goes on.

An exporter is a class that takes a `Target` and has `log`, `flush` and `close`, see `sink.Sink`. What the
scalars are called is the matter of `names`.
"""

from __future__ import annotations

from gradscope.registry import Registry

EXPORTERS = Registry(
    "exporter",
    {
        "csv": "gradscope.exporters.csv:Exporter",
        "parquet": "gradscope.exporters.parquet:Exporter",
        "tensorboard": "gradscope.exporters.tensorboard:Exporter",
        "wandb": "gradscope.exporters.wandb:Exporter",
        "trackio": "gradscope.exporters.trackio:Exporter",
    },
)
