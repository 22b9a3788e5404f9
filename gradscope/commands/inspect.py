"""`gradscope inspect`: what a run's files hold, and in what state they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory or run.h5.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what RUN holds: groups, steps, gaps, segments, events, sizes, journals, provenance, damage."""
    from gradscope.runfile.summary import summarize

    summary = summarize(run)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    for line in _lines(summary):
        typer.echo(line)


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    yield f"{summary['run']}: schema {summary['schema_version']}, {summary['state']}"
    provenance = summary["provenance"]
    for name in ("run_id", "created_at", "gradscope_version", "git_hash", "seed", "hardware"):
        if name in provenance:
            yield f"  {name:<18} {provenance[name]}"
    yield f"  {'packages':<18} " + ", ".join(
        f"{name} {found}" for name, found in provenance["packages"].items()
    )
    yield "Slots"
    for slot, own in summary["slots"].items():
        yield f"  {slot:<18} role {own['role']}, policy {own['policy']}"
    yield from _progress(summary)
    yield "Groups"
    for name, group in summary["groups"].items():
        rows = ", ".join(f"{count} on {dim}" for dim, count in group["rows"].items())
        size = f", {group['num_bytes']:,} bytes in the file" if group["num_bytes"] else ""
        yield f"  /{name}: {rows}{size}"
        for label, variable in group["variables"].items():
            missing = f", {variable['missing']:.1%} missing" if variable["missing"] else ""
            yield f"    {label:<24} ({', '.join(variable['dims'])}){missing}"
    yield from _files(summary)


def _progress(summary: dict[str, Any]) -> Iterator[str]:
    steps = summary["steps"]
    yield f"Steps: {steps['num']}" + (f", {steps['first']} to {steps['last']}" if steps["num"] else "")
    for before, after in steps["gaps"]:
        yield f"  gap: nothing between step {before} and step {after}"
    for title, key in (("Updates", "updates"), ("Evaluations", "evaluations"), ("Events", "events")):
        counts = summary[key]
        yield f"{title}: " + (", ".join(f"{count} {name}" for name, count in counts.items()) or "none")
    yield "Segments"
    for segment in summary["segments"]:
        origin = "" if segment["resumed_from_step"] is None else f", from step {segment['resumed_from_step']}"
        span = f"steps {segment['start_step']} to {segment['end_step']}"
        if segment["start_step"] is None:
            span = "no steps"
        yield f"  {segment['segment']}: {span}{origin}, started {segment['created_at']}"
    for name, group in summary["superseded"].items():
        yield (
            f"  superseded/{name}: {group['num_steps']} steps, left behind by segment "
            f"{group['superseded_by']} from step {group['resumed_from_step']}"
        )


def _files(summary: dict[str, Any]) -> Iterator[str]:
    yield "Files"
    for name, size in summary["files"].items():
        yield f"  {name:<24} {size:,} bytes"
    for journal in summary["journals"]:
        state = "" if journal["has_header"] else ", no readable header"
        yield f"  {journal['name']}: {journal['num_records']} records{state}"
        for damage in journal["damage"]:
            yield f"    {damage['num_bytes']} bytes from {damage['offset']}: {damage['what']}"
    if summary["journals"]:
        num = summary["num_overlaid_records"]
        yield f"  in journals only: {num} record{'' if num == 1 else 's'}"
    if summary["damage"]:
        yield "Damage"
        yield from (f"  {sentence}" for sentence in summary["damage"])
