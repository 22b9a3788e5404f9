"""Lets logs end well when the process is asked to stop by SIGTERM and nobody else takes care of that.

Schedulers send it some seconds before they kill. A handler is installed only where there is none, by the main
thread; the process dies of the signal all the same, as its parent expects.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Termination:
    """Calls a function once when SIGTERM comes, never in the middle of a `with` block of this object.

    Args:
        end: What to do.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._depth = 0
        self._requested = False
        self._process = os.getpid()
        _watching.add(self)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _stop)

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._requested and not self._depth:
            os.kill(os.getpid(), signal.SIGTERM)

    def release(self) -> None:
        """Takes no more care of the signal."""
        _watching.discard(self)
        if not _watching and _in_main_thread() and signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def postpones(self) -> bool:
        """Returns whether a `with` block is being executed, at whose end the signal will come again."""
        self._requested = self._depth > 0
        return self._requested

    def end(self) -> None:
        """Does what is to be done."""
        self._end()

    @property
    def is_own(self) -> bool:
        """Whether this process is the one that is to do it, and no fork."""
        return self._process == os.getpid()


_watching: weakref.WeakSet[Termination] = weakref.WeakSet()

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Terminable(Protocol):
    """Something whose methods SIGTERM must not cut short."""

    _termination: Termination


Self = TypeVar("Self", bound=Terminable)


def uninterrupted(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Makes a method finish before the process dies of SIGTERM."""

    @functools.wraps(method)
    def whole(self: Self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._termination:
            return method(self, *args, **kwargs)

    return whole


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _stop(number: int, frame: FrameType | None) -> None:
    own = [each for each in _watching if each.is_own]
    busy = [each for each in own if each.postpones()]
    if busy:
        return
    for each in own:
        each.end()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
