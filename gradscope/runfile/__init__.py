"""The run file: `RunWriter` writes one, `open_run` reads one, `UpdateRecord` is what probes hand in.

Names are imported when first used, so that writing loads no xarray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradscope.runfile.reader import open_run
    from gradscope.runfile.update import UpdateRecord
    from gradscope.runfile.writer import RunWriter

__all__ = ["RunWriter", "UpdateRecord", "open_run"]

_MODULES = {"RunWriter": "writer", "UpdateRecord": "update", "open_run": "reader"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"gradscope.runfile.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'gradscope.runfile' has no attribute '{name}'")
