"""Copies and pickles of a probed model are the model without its probe.

`copy.deepcopy` and pickle ask a module for its state through `__reduce_ex__`, which they look up on the
module itself: while a probe is attached, every module that has something of it answers without.
"""

from __future__ import annotations

from typing import Any

from torch import nn

PACKAGE = "gradscope.probes."
"""Where everything that a probe puts on modules is defined."""
REDUCTION = "__reduce_ex__"


class OwnReduction:
    """Stands on a module as its `__reduce_ex__`, leaves out what a probe put there, and takes itself off."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        vars(module)[REDUCTION] = self

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        """Returns what the module's class would, with a state that has nothing of the probe."""
        reduced = type(self._module).__reduce_ex__(self._module, protocol)
        assert isinstance(reduced, tuple)
        constructor, arguments, state, *rest = reduced
        return (constructor, arguments, _without_probe(state) if isinstance(state, dict) else state, *rest)

    def remove(self) -> None:
        """Lets the module be copied as its class says."""
        vars(self._module).pop(REDUCTION, None)


def guard_copies(model: nn.Module) -> list[OwnReduction]:
    """Has copies of a model leave its probe behind; called when all of it is in place.

    The model itself is always guarded: what is wrapped later may put a hook there.
    """
    return [OwnReduction(module) for module in model.modules() if module is model or _has_probe(vars(module))]


def _is_ours(value: Any) -> bool:
    return not isinstance(value, nn.Module) and str(getattr(value, "__module__", "")).startswith(PACKAGE)


def _has_probe(state: dict[str, Any]) -> bool:
    held = (value for one in state.values() for value in (one.values() if isinstance(one, dict) else (one,)))
    return any(_is_ours(value) for value in held)


def _without_probe(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a module's state without hooks, forwards and this class's objects."""
    hooks = {
        number
        for value in state.values()
        if isinstance(value, dict)
        for number, hook in value.items()
        if _is_ours(hook)
    }
    return {
        key: _without(value, hooks) if isinstance(value, dict) else value
        for key, value in state.items()
        if not _is_ours(value)
    }


def _without(held: dict[Any, Any], hooks: set[Any]) -> dict[Any, Any]:
    """Returns a dictionary of a module without some hooks, itself where it has none of them."""
    if hooks.isdisjoint(held):
        return held
    kept = held.copy()
    for number in hooks:
        kept.pop(number, None)
    return kept
