"""A snapshot as a terminal shows it: lines of numbers, each with the way there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from gradscope.watch.alarms import Alarm
from gradscope.watch.snapshot import Snapshot

Array = NDArray[np.float64]

LEVELS = "▁▂▃▄▅▆▇█"
GAP = "·"
CURVE_WIDTH = 60
NAME_WIDTH = 30
BAR_WIDTH = 20
BLOCKS = ("█", "▓", "▒", "░")
"""One shade a role, so that a bar can be read without colours."""
COLOURS = ("blue", "yellow", "green", "magenta")


def view(snapshot: Snapshot, *, width: int) -> RenderableType:
    """Returns what to print in that many columns; texts of the run are never read as markup."""
    return Group(_title(snapshot), *_numbers(snapshot, width), *_bars(snapshot), *_sentences(snapshot))


def curve(values: Array, width: int) -> str:
    """Returns a series as a line of blocks between its smallest and largest value, a dot where it is missing.

    A series longer than `width` is shown by means of neighbours.
    """
    if not values.size:
        return ""
    parts = np.array_split(values, min(width, values.size))
    known = [part[np.isfinite(part)] for part in parts]
    means = np.array([part.mean() if part.size else np.nan for part in known])
    if np.isnan(means).all():
        return GAP * means.size
    low, high = np.nanmin(means), np.nanmax(means)
    scale = (means - low) / (high - low) if high > low else np.where(np.isnan(means), np.nan, 0.5)
    return "".join(
        GAP if np.isnan(level) else LEVELS[min(int(level * len(LEVELS)), len(LEVELS) - 1)] for level in scale
    )


def _title(snapshot: Snapshot) -> Text:
    step = "no step yet" if snapshot.step is None else f"step {snapshot.step}"
    segment = f", segment {snapshot.segment}" if snapshot.segment else ""
    return Text(f"{snapshot.name}: {step}{segment}, {snapshot.state}", style="bold")


def _numbers(snapshot: Snapshot, width: int) -> Iterator[Text]:
    """Yields name, last value and curve of every series; the curve takes the room that is left."""
    rows = [("reward", _last(snapshot.reward, "{:.3f}"), snapshot.reward)]
    for accuracy in snapshot.accuracies:
        low, high = accuracy.interval
        fraction = accuracy.num_correct / accuracy.num_total
        told = f"{fraction:.3f} ({low:.3f}-{high:.3f}) at {accuracy.step}"
        rows.append((accuracy.setting, told, accuracy.values))
    for role, norms in snapshot.norms.items():
        rows.append((f"norm, {role}", _last(norms, "{:.3g}"), np.log(np.where(norms > 0, norms, np.nan))))
    for subject, coherence in snapshot.coherences.items():
        rows.append((f"coherence, {subject}", _last(coherence, "{:.2f}"), coherence))
    known = [row for row in rows if row[1]]
    name_width = min(max((len(name) for name, _, _ in known), default=0), NAME_WIDTH)
    value_width = max((len(value) for _, value, _ in known), default=0)
    room = max(min(width - name_width - value_width - 4, CURVE_WIDTH), 1)
    for name, value, values in known:
        shown = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
        yield Text(f"{shown:<{name_width}}  {value:<{value_width}}  {curve(values, room)}", no_wrap=True)


def _last(values: Array, form: str) -> str:
    """Returns the last value that is there; nothing where none is."""
    known = values[np.isfinite(values)]
    return form.format(known[-1]) if known.size else ""


def _bars(snapshot: Snapshot) -> Iterator[Text]:
    for policy, shares in snapshot.shares.items():
        if not np.isfinite(list(shares.values())).all():
            continue
        line = Text(f"energy share on {policy}  ")
        for place, (_, share) in enumerate(shares.items()):
            width = round(share * BAR_WIDTH)
            line.append(BLOCKS[place % len(BLOCKS)] * width, style=COLOURS[place % len(COLOURS)])
        for place, (role, share) in enumerate(shares.items()):
            line.append(f"  {BLOCKS[place % len(BLOCKS)]} ", style=COLOURS[place % len(COLOURS)])
            line.append(f"{role} {share:.0%}")
        yield line


def _span(alarm: Alarm) -> str:
    if alarm.last_step is None:
        return f"since step {alarm.step}"
    return f"from step {alarm.step} to {alarm.last_step}"


def _sentences(snapshot: Snapshot) -> Iterator[Text]:
    for alarm in snapshot.alarms:
        yield Text(
            f"gradient regime changed: {alarm.subject}, {_span(alarm)} (size and coherence both rose; "
            "not every such change ends in a cliff)",
            style="bold red" if alarm.last_step is None else "red",
        )
    for step, kind, message in snapshot.events:
        yield Text(f"step {step}: {kind}: {message}", style="dim")
    if snapshot.damage:
        yield Text(f"damaged: {snapshot.damage}", style="red")
