"""How a process of our own is started: what it runs, and the order that it reads from its standard input."""

from __future__ import annotations

import json
import sys
from typing import Any

_PROGRAM = (
    "import importlib, json, sys; order = json.load(sys.stdin); sys.path[:] = order['path']; "
    "importlib.import_module(order['module']).main(order)"
)


def command() -> list[str]:
    """Returns the command of a child, which does what `main` of the ordered module does."""
    return [sys.executable, "-c", _PROGRAM]


def order(module: str, **content: Any) -> str:
    """Returns an order as JSON.

    Args:
        module: Full name of the module whose `main` takes the order.
        content: What else stands in it.
    """
    return json.dumps({"path": sys.path, "module": module, **content})
