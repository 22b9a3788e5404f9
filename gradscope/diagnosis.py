"""Runs every registered detector over a run and gathers what they say."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from gradscope import __version__
from gradscope.detectors import DETECTORS
from gradscope.detectors.finding import Finding as Finding
from gradscope.detectors.finding import Skipped
from gradscope.errors import GradscopeError, RunFileError, SchemaError
from gradscope.report.limits import unanswerable
from gradscope.runfile import open_run
from gradscope.schema import TABLES


@dataclass(frozen=True)
class Diagnosis:
    """What detectors saw in one run.

    Attributes:
        run: What the run is called.
        findings: What was found, `possible` ones included, in the order of the detectors.
        quiet: What was looked for and not seen, or could not be told; with scores.
        skipped: Detectors that could not look, with the reason in a user's words.
        broken: Detectors that failed, with the traceback: our bug, or that of a plug-in. Also in `skipped`.
        limits: What this log cannot answer.
        schema_version: Of the run file; empty where it does not say.
    """

    run: str
    findings: tuple[Finding, ...]
    quiet: tuple[Finding, ...]
    skipped: Mapping[str, str]
    broken: Mapping[str, str]
    limits: tuple[str, ...]
    schema_version: str

    def to_dict(self) -> dict[str, Any]:
        """Returns what a machine reads: plain Python, missing numbers as None."""
        return {
            "run": self.run,
            "findings": [_plain(asdict(finding)) for finding in self.findings],
            "not_found": [_plain(asdict(finding)) for finding in self.quiet],
            "skipped": dict(self.skipped),
            "limits": list(self.limits),
            "schema_version": self.schema_version,
            "gradscope_version": __version__,
        }

    def to_json(self) -> str:
        """Returns `to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def diagnose(run: xr.DataTree | str | Path, *, name: str | None = None) -> Diagnosis:
    """Returns what every registered detector saw in the run.

    A detector that fails does not hide what the others saw; its error stands under `skipped` and `broken`.
    One that meets content which cannot be is skipped with the reason.

    Args:
        run: An opened run, or the path of a run directory or run.h5.
        name: What to call it; by default the path, or the run's id.

    Raises:
        SchemaError: It is neither.
        RunFileError: There is no readable run at that path.
    """
    if isinstance(run, str | Path):
        opened = open_run(run)
        if not any(name in opened and opened[name].sizes[TABLES[name].dim] for name in ("train", "eval")):
            raise RunFileError(
                f"{run}: holds neither steps nor evaluations, so there is nothing to diagnose. "
                "Was the run ended before its first step?"
            )
        return diagnose(opened, name=name or str(run))
    if not isinstance(run, xr.DataTree):
        raise SchemaError(
            f"diagnose takes an opened run (gradscope.open_run) or its path, not {type(run).__name__}."
        )
    findings: list[Finding] = []
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    for detector in DETECTORS.names():
        try:
            findings += DETECTORS.get(detector)(run)
        except (Skipped, GradscopeError) as reason:
            skipped[detector] = str(reason).rstrip(".")
        except Exception as error:
            skipped[detector] = f"failed with {type(error).__name__}: {error}"
            broken[detector] = traceback.format_exc()
    return Diagnosis(
        run=name or str(run.attrs.get("run_id", "unnamed run")),
        findings=tuple(finding for finding in findings if not finding.quiet),
        quiet=tuple(finding for finding in findings if finding.quiet),
        skipped=skipped,
        broken=broken,
        limits=unanswerable(run),
        schema_version=str(run.attrs.get("schema_version", "")),
    )


def asked_for(diagnosis: Diagnosis, kinds: Iterable[str]) -> list[Finding]:
    """Returns the findings of those kinds whose verdict reaches the level of the kind's name, or above."""
    wanted = set(kinds)
    return [finding for finding in diagnosis.findings if finding.kind in wanted and finding.established]


def untold(diagnosis: Diagnosis, kinds: Iterable[str]) -> list[str]:
    """Returns those kinds of which nothing could be told: skipped, or undetermined wherever looked for."""
    told = {
        finding.kind
        for finding in (*diagnosis.findings, *diagnosis.quiet)
        if finding.strength != "undetermined"
    }
    return [kind for kind in kinds if kind not in told]


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it: numpy scalars as Python's, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
