"""Finds out how a source is stored, and says why where nobody knows it."""

from __future__ import annotations

from pathlib import Path

from gradscope.errors import DataError
from gradscope.importers import IMPORTERS
from gradscope.runfile.paths import RunPaths

GZIP = b"\x1f\x8b"
PEEK = 4096
BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


def format_of(source: str) -> str:
    """Returns the name of the importer that recognises a source.

    Raises:
        DataError: None does; or the source is absent, or a run of ours.
    """
    path = Path(source)
    if path.exists() and RunPaths.of(path).exists():
        raise DataError(f"{source}: is a run already and needs no import. See 'gradscope diagnose {source}'.")
    for name in IMPORTERS.names():
        if IMPORTERS.get(name)().recognises(source):
            return name
    if not path.exists():
        raise DataError(f"{source}: no such file or directory.")
    raise DataError(
        f"{source}: no known format{_why(path)}. Name one with --format: {', '.join(IMPORTERS.names())}; "
        "see 'gradscope list importers'."
    )


def _why(path: Path) -> str:
    """Returns what can be told from the first bytes, in brackets; nothing for a folder."""
    if path.is_dir():
        return "" if any(path.iterdir()) else " (an empty folder)"
    try:
        with path.open("rb") as file:
            head = file.read(PEEK)
    except OSError as error:
        return f" (it cannot be read: {error.strerror})"
    if not head.strip():
        return " (it holds nothing but blank lines)" if head else " (the file is empty)"
    if head.startswith(GZIP):
        return " (it is compressed with gzip: unpack it first)"
    if head.startswith(BYTE_ORDER_MARKS):
        return " (its text is UTF-16: store it as UTF-8)"
    return " (it holds no text)" if b"\0" in head or not _is_text(head) else ""


def _is_text(head: bytes) -> bool:
    try:
        head[: len(head) - 3 if len(head) == PEEK else len(head)].decode("utf-8")
    except UnicodeDecodeError as error:
        return len(head) == PEEK and error.start > PEEK - 8  # a character cut at the end
    return True
