"""The errors that gradscope raises for what a user or a file hands in.

Each derives from `GradscopeError` and from the builtin it specialises. The command line prints them as one
line and exits with code 2; anything else is a bug of ours (code 3, with the traceback).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradscopeError(Exception):
    """Base of every error that is the user's to mend, not ours."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigError(GradscopeError, ValueError):
    """A configuration, preset or command-line value that cannot be used."""


class UnknownNameError(GradscopeError, KeyError):
    """A name that no registry, preset, role or slot answers to."""


class RunFileError(GradscopeError, OSError):
    """A run directory or run file that is absent, damaged, foreign or already taken."""


class SchemaError(GradscopeError, ValueError):
    """Data whose names, shapes or version do not fit the schema of the run file."""


class DataError(GradscopeError, ValueError):
    """A data set (JSONL, answer key) that cannot be read; says file, line and field."""


class ProbeError(GradscopeError, RuntimeError):
    """A probe that cannot measure what was asked, or that stopped measuring."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest allowed name, or an empty string."""
    match = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean '{match[0]}'?" if match else ""


def unknown_name(kind: str, name: str, allowed: Iterable[str], *, where: str = "") -> UnknownNameError:
    """Builds the one-line error for a name that is not among `allowed`."""
    choices = list(allowed)
    place = f"{where}: " if where else ""
    return UnknownNameError(
        f"{place}unknown {kind} '{name}'.{nearest(name, choices)} Allowed: {', '.join(choices) or 'none'}."
    )
