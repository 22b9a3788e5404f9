"""`gradscope list`: the presets and plug-ins that exist here."""

from __future__ import annotations

import importlib
import json
from typing import Annotated

import typer

from gradscope.errors import unknown_name

REGISTRIES = {
    "workflows": "gradscope.train.workflows:WORKFLOWS",
    "tasks": "gradscope.train.tasks:TASKS",
    "detectors": "gradscope.detectors:DETECTORS",
    "figures": "gradscope.figures:FIGURES",
    "importers": "gradscope.importers:IMPORTERS",
    "exporters": "gradscope.exporters:EXPORTERS",
    "dialects": "gradscope.importers.dialects:DIALECTS",
}


def list_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=", ".join(["presets", *REGISTRIES]) + ".")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, name to description.")
    ] = False,
) -> None:
    """List presets or plug-ins with one line about each."""
    described = _describe(kind)
    if as_json:
        typer.echo(json.dumps(described, indent=2))
        return
    width = max(map(len, described), default=0)
    for name, line in described.items():
        typer.echo(f"{name:<{width}}  {line}")


def _describe(kind: str) -> dict[str, str]:
    if kind == "presets":
        from gradscope.train.config import describe_presets

        return describe_presets()
    if kind not in REGISTRIES:
        raise unknown_name("kind", kind, ["presets", *REGISTRIES])
    module, _, attribute = REGISTRIES[kind].partition(":")
    return getattr(importlib.import_module(module), attribute).describe()
