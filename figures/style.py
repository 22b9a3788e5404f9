"""One look for all figures: the style sheet, paper widths, and one colour and marker a role."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.typing import LineStyleType

STYLE_SHEET = Path(__file__).with_name("gradscope.mplstyle")
COLUMN_WIDTH = 3.25
"""Inches: one column of a two-column paper."""
FULL_WIDTH = 6.75
"""Inches: both columns."""
BAND_OPACITY = 0.16
REFERENCE_COLOUR = "0.35"
"""Lines that are computed, not measured."""


class Look(NamedTuple):
    """Colour, marker and dashes of a line, so that it can be told apart in grey print too."""

    colour: str
    marker: str
    dashes: LineStyleType = "-"


ROLE_LOOKS = {
    "generator": Look("#0072B2", "o"),
    "evaluator": Look("#D55E00", "s"),
    "aggregator": Look("#E69F00", "D"),
    "orchestrator": Look("#CC79A7", "^"),
    "worker": Look("#009E73", "v"),
    "synthesizer": Look("#56B4E9", "P"),
}
"""Okabe-Ito colours of the known roles."""

_OTHER_LOOKS = (
    Look("#332288", "<"), Look("#999933", ">"), Look("#117733", "p"), Look("#AA4499", "h"),
    Look("#661100", "*"), Look("#44AA99", "d"), Look("#DDCC77", "8"), Look("#CC6677", "X"),
)  # fmt: skip

LAYOUT_LOOKS = {"IP": Look("black", "o"), "SP": Look("#882255", "s", (0, (4, 1.5)))}
_OTHER_LAYOUT_LOOKS = (Look("0.45", "^", (0, (1, 1))), Look("0.6", "v", (0, (4, 1, 1, 1))))
"""Colours that no role has."""


def paper_style() -> AbstractContextManager[None]:
    """Returns a context of the style sheet over matplotlib's defaults, whatever the user's settings are."""
    return matplotlib.rc_context(fname=str(STYLE_SHEET))


def role_looks(roles: Iterable[str]) -> dict[str, Look]:
    """Returns the look of each role: fixed for the known ones, for others by a hash of their name.

    A role keeps its look whatever stands beside it; only where two unknown names meet on one look does the
    later one in the alphabet move to the next free look.
    """
    names = list(dict.fromkeys(roles))
    taken: dict[str, int] = {}
    for name in sorted(name for name in names if name not in ROLE_LOOKS):
        place = zlib.crc32(name.encode()) % len(_OTHER_LOOKS)
        while place in taken.values() and len(taken) < len(_OTHER_LOOKS):
            place = (place + 1) % len(_OTHER_LOOKS)
        taken[name] = place
    return {name: ROLE_LOOKS[name] if name in ROLE_LOOKS else _OTHER_LOOKS[taken[name]] for name in names}


def policy_looks(layouts: Iterable[str]) -> dict[str, Look]:
    """Returns the look of each policy layout (`IP`, `SP` or a map), in colours that no role has."""
    names = list(dict.fromkeys(layouts))
    others = [name for name in names if name not in LAYOUT_LOOKS]
    free = {name: _OTHER_LAYOUT_LOOKS[place % len(_OTHER_LAYOUT_LOOKS)] for place, name in enumerate(others)}
    return {name: LAYOUT_LOOKS.get(name) or free[name] for name in names}
