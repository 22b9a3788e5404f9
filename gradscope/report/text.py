"""A diagnosis as plain text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from gradscope.diagnosis import Diagnosis

WIDTH = 100


def render(diagnosis: Diagnosis) -> str:
    """Returns the diagnosis as text: what was found, looked for, skipped, broken, and cannot be answered."""
    return "\n".join(_lines(diagnosis)) + "\n"


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"Diagnosis of {diagnosis.run}"
    yield from _section("Found", [finding.sentence for finding in diagnosis.findings] or ["Nothing."])
    yield from _section("Looked for and not found", [finding.sentence for finding in diagnosis.quiet])
    skipped = [f"{name}: {why}." for name, why in diagnosis.skipped.items() if name not in diagnosis.broken]
    yield from _section("Not looked for", skipped)
    broken = [f"{name}: {diagnosis.skipped[name]}. Please report it." for name in diagnosis.broken]
    yield from _section("Detectors that failed (a bug of ours, not of the run)", broken)
    yield from _section("What this log cannot answer", [f"{limit}." for limit in diagnosis.limits])


def _section(title: str, entries: Iterable[str]) -> Iterator[str]:
    entries = list(entries)
    if not entries:
        return
    yield ""
    yield title
    for entry in entries:
        yield textwrap.fill(
            entry,
            WIDTH,
            initial_indent="  - ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
