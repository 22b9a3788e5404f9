"""`gradscope doctor`: what is installed, what it can do here, and what the file system promises."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from gradscope.extras import EXTRAS, NEEDS, installing
from gradscope.runfile.promises import check_folder


@dataclass(frozen=True)
class Check:
    """One line of the doctor: what was looked at, whether it is fine, what was found, what to do."""

    name: str
    ok: bool
    found: str
    advice: str = ""


def doctor(
    folder: Annotated[Path, typer.Option("--folder", help="Where runs will be written.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this installation, the device and the file system under FOLDER; exit 1 if something is broken."""
    checks = [_python(), *_packages(), _embedded_model(), _device(), *_file_system(folder)]
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            typer.echo(f"{'ok ' if check.ok else 'NO '} {check.name:<22} {check.found}")
            if check.advice:
                typer.echo(f"    {check.advice}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", sys.version_info >= (3, 11), found)


def _packages() -> list[Check]:
    checks = []
    for job, names in NEEDS.items():
        versions = {name: _version(name) for name in names}
        missing = [name for name, found in versions.items() if found is None]
        found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
        advice = ""
        if missing:
            advice = f"missing: {', '.join(missing)}. {installing(EXTRAS.get(job))}."
        # Only diagnosis is needed by everybody; the rest is a choice.
        checks.append(Check(f"packages: {job}", job != "diagnosis" or not missing, found or "none", advice))
    return checks


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _embedded_model() -> Check:
    spec = importlib.util.find_spec("gradscope.train")
    folder = Path(spec.origin).parent / "assets" / "tiny" if spec and spec.origin else None
    if folder is None:
        return Check(
            "embedded model",
            False,
            "the package gradscope.train is not found",
            "Links are missing here: run 'git config --global core.symlinks true' and clone again.",
        )
    weights = folder / "model.safetensors"
    size = f"{weights.stat().st_size / 1e3:.0f} kB" if weights.is_file() else "weights not found"
    return Check("embedded model", weights.is_file(), size)


def _device() -> Check:
    if _version("torch") is None:
        return Check("device", True, "not looked at: torch is not installed")
    import torch

    if torch.cuda.is_available():
        return Check("device", True, f"CUDA: {torch.cuda.get_device_name()}")
    return Check("device", True, f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads")


def _file_system(folder: Path) -> list[Check]:
    if not folder.is_dir():
        return [
            Check("file system", False, f"'{folder}' is not a folder", "Name an existing one with --folder.")
        ]
    return [
        Check(f"files: {promise.name}", promise.is_kept, promise.found, promise.advice)
        for promise in check_folder(folder)
    ]
