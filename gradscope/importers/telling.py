"""What an import tells its user: traps of the source, what was assumed, what the log cannot answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from gradscope.importers.dialect import Dialect
from gradscope.importers.log import ForeignLog
from gradscope.importers.long_table import Entry
from gradscope.importers.roster import Roster
from gradscope.importers.wording import listed, ordinal

WITHOUT_ANGLES = (
    "angles between gradients, so coherence, alignment and the shares of a shared policy: the source logs "
    "norms at most"
)
WITHOUT_MODULES = "which modules a gradient was in: the source logs whole norms at most"


def notes_of(
    dialect: Dialect, keys: Sequence[str], table: Sequence[Entry], people: Roster, starts: Sequence[int]
) -> tuple[str, ...]:
    """Returns one sentence for each thing that may be misread; `starts` are the segments' first steps."""
    notes = [trap.sentence for trap in dialect.traps if any(re.fullmatch(trap.pattern, key) for key in keys)]
    notes += _interval(dialect, table)
    if len(starts) > 1:
        notes.append(
            f"Steps go back {len(starts) - 1} time(s), as after a resume: each step is kept once, of the "
            "later stretch; what it replaced is under /superseded."
        )
    if any(start <= starts[0] for start in starts[1:]):
        notes.append(
            f"A later stretch starts over at step {min(starts[1:])}, so nothing of the first is kept. "
            "Where these are several runs and no resume, import them one by one."
        )
    if people.assumed and len(people.slots) > 1:
        notes.append(
            f"The log does not say which policy {', '.join(people.assumed)} train; they stand on one, '"
            f"{people.policies[people.assumed[0]]}'. A mapping file can say it (policies:)."
        )
    return tuple(notes)


def renamed_note(keys: Sequence[str]) -> tuple[str, ...]:
    """Says so where keys are kept under another name, since theirs is taken."""
    if not keys:
        return ()
    return (f"{len(keys)} key(s) differ from another in '/' and '.' only and get a number ({listed(keys)}).",)


def said_limits(log: ForeignLog) -> tuple[str, ...]:
    """Returns what the source itself says that it cannot answer, as an export of an imported run does."""
    own = log.about.get("limits")
    return tuple(str(limit) for limit in own) if isinstance(own, list) else ()


def _interval(dialect: Dialect, table: Sequence[Entry]) -> list[str]:
    """Says so where gradient norms stand at every n-th step only."""
    steps = np.unique([entry.step for entry in table if entry.metric == "grad_norm"])
    gaps = np.diff(steps)
    if not gaps.size or np.median(gaps) <= 1:
        return []
    meaning = {
        "last": "each is of the last step before it, so spikes between are lost",
        "mean": "each is a mean over the steps before it, so spikes are flattened",
    }.get(dialect.window, "spikes between may be lost")
    return [f"Gradient norms stand at every {ordinal(float(np.median(gaps)))} step only: {meaning}."]


def limits_of(
    dialect: Dialect, table: Sequence[Entry], people: Roster, fractions: Iterable[str]
) -> tuple[str, ...]:
    """Returns what the source cannot answer."""
    limits = list(dialect.limits)
    products = [entry.meaning.labels for entry in table if entry.metric == "gram"]
    if table and not any(labels["slot"] != labels["slot_b"] for labels in products):
        limits.append(WITHOUT_ANGLES)
    if table:
        limits.append(WITHOUT_MODULES)
    shared = [policy for policy in set(people.policies.values()) if len(people.slots_on(policy)) > 1]
    norms = {entry.metric for entry in table} & {"grad_norm", "gram"}
    if norms == {"grad_norm"} and shared:
        limits.append(f"each role's part in the norm of {', '.join(sorted(shared))}: it is of the roles' sum")
    if table and not norms:
        limits.append("how large gradients were: the source logs no gradient norm")
    keys = list(fractions)
    if keys:
        limits.append(
            f"whether accuracy held: {listed(keys, most=3)} are fractions of an unknown number of answers; "
            "say the number of problems with --num-total"
        )
    return tuple(limits)
