"""Where and with what a run was made: code, packages, machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradscope import __version__
from gradscope.schema import SCHEMA_VERSION

_PACKAGES = ("numpy", "scipy", "h5py", "xarray", "torch", "transformers", "peft", "tokenizers", "trl", "vllm")


def now() -> str:
    """Returns the time in ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def root_attributes(
    config: Mapping[str, Any] | None, seed: int | None, hardware: str | None
) -> dict[str, Any]:
    """Returns the root attributes of a new run."""
    attributes: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "gradscope_version": __version__,
        "run_id": uuid.uuid4().hex,
        "created_at": now(),
        "config_json": config_json(config),
        "git_hash": git_hash(),
        "packages_json": json.dumps({name: found for name in _PACKAGES if (found := installed(name))}),
        "hardware": hardware or f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
    }
    return attributes if seed is None else {**attributes, "seed": _attribute(int(seed))}


def _attribute(seed: int) -> int | str:
    """Returns a seed as HDF5 holds it: a number of 64 bits, a longer one as decimal text."""
    return seed if -(2**63) <= seed < 2**63 else str(seed)


def config_json(config: Mapping[str, Any] | None) -> str:
    """Returns a configuration as JSON; what JSON cannot say is spelled as text."""
    return json.dumps({} if config is None else dict(config), default=str)


def installed(package: str) -> str | None:
    """Returns the version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_hash() -> str:
    """Returns the commit of the checkout that this package runs from, `-dirty` if changed.

    Empty when it is installed without one, also inside somebody else's repository.
    """
    source = Path(__file__).resolve()
    if not _git(source.parent, "ls-files", "--error-unmatch", source.name):
        return ""
    return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *words: str) -> str:
    """Returns what git says in a folder; empty when it fails or is absent."""
    # Inside a hook these point at the repository that the hook belongs to.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *words]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
