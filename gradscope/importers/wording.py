"""Names of a source as a sentence may show them: few, on one line, without control characters."""

from __future__ import annotations

from collections.abc import Iterable

NAMELESS = "(no name)"


def plain(text: str) -> str:
    """Returns a text in which what a terminal would obey, or break a line at, stands as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def listed(names: Iterable[object], *, most: int = 6, none: str = "") -> str:
    """Returns the first names, and how many more there are; `none` when there are none."""
    texts = [plain(str(name)) or NAMELESS for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more if texts else none


def ordinal(number: float) -> str:
    """Returns `2nd`, `10th`, ...; halves as `2.5th`."""
    if number % 1 or 10 <= number % 100 < 20:
        return f"{number:g}th"
    return f"{number:g}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(int(number % 10), 'th') }".replace(" ", "")
