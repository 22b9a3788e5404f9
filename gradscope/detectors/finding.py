"""What a detector hands back: a finding, or the reason why it could not look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Evidence = Mapping[str, float | int | str | None]

QUIET = ("none", "undetermined")
"""Verdicts that are no finding: looked for and not seen, or too little data to say."""


@dataclass(frozen=True)
class Finding:
    """One thing that a detector looked for, and what it saw.

    Attributes:
        kind: What was looked for, the detector's name.
        role: The role it concerns; None where it concerns the whole run.
        step: Training step of its onset; None where there is none.
        strength: The verdict's word; `none` and `undetermined` report what was looked for and not seen.
        evidence: The numbers behind it by name; a missing one is NaN.
        sentence: What a colleague would say.
    """

    kind: str
    role: str | None
    step: int | float | None
    strength: str
    evidence: Evidence = field(default_factory=dict)
    sentence: str = ""

    @property
    def quiet(self) -> bool:
        """Whether nothing was found."""
        return self.strength in QUIET

    @property
    def established(self) -> bool:
        """Whether the verdict reaches the level of its kind's name, or above."""
        return self.strength in (self.kind, "strong")


class Skipped(Exception):  # noqa: N818 - not an error: the run simply does not hold what the detector reads
    """Raised by a detector whose inputs the run does not hold; the text says which, for a user."""
