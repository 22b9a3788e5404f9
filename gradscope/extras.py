"""Which packages each job needs, and which extra of this distribution brings them."""

from __future__ import annotations

NEEDS = {
    "diagnosis": ("numpy", "scipy", "xarray", "h5py", "h5netcdf"),
    "figures": ("matplotlib", "pandas"),
    "probes": ("torch",),
    "training": ("torch", "transformers", "peft", "safetensors", "pydantic", "jinja2"),
    "GGUF models": ("gguf",),
    "many runs at once": ("dask",),
    "other tools' logs": ("tensorboard", "pyarrow", "trackio", "wandb"),
    "probes in TRL": ("trl",),
    "probes in verl": ("verl",),
}
"""Job to its packages; diagnosis needs nothing beyond the plain installation."""

EXTRAS = {
    "figures": "figures",
    "probes": "probes",
    "training": "train",
    "GGUF models": "smollm",
    "many runs at once": "dask",
    "other tools' logs": "importers",
    "probes in TRL": "parity",
    "probes in verl": "verl",
}
"""Job to the extra that brings its packages."""


def installing(extra: str | None) -> str:
    """Returns how an extra is installed, as a sentence goes on; None for the plain installation."""
    what = f'".[{extra}]"' if extra else "."
    return f"Run 'pip install {what}' in the source folder of gradscope"


def extra_of(package: str) -> str | None:
    """Returns the largest extra that brings a package; None for one that no extra brings."""
    found = [extra for job, extra in EXTRAS.items() if package in NEEDS[job]]
    return found[-1] if found else None
