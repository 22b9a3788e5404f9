"""Who may be at work on a log: one thread at a time, of one process, and to its end when SIGTERM comes.

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

from gradscope.errors import RunFileError


class Termination:
    """Calls a function once when SIGTERM comes, never in the middle of a `with` block of this object.

    Of several threads one is in such a block at a time; it may enter another.

    Args:
        end: What to do.
        name: The log's, for messages.

    Raises:
        RunFileError: On entering, in a process that was forked from the one that made this object.
    """

    def __init__(self, end: Callable[[], None], name: str) -> None:
        self._end = end
        self._name = name
        self._turn = threading.RLock()
        self._depth = 0
        self._requested = False
        self._process = os.getpid()
        _watching.add(self)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _stop)

    def __enter__(self) -> None:
        if not self.is_own:  # asked first: a thread that the fork lacks may hold the lock for ever
            raise RunFileError(
                f"{self._name}: this writer belongs to process {self._process}; open one of its own."
            )
        self._turn.acquire()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        is_due = self._requested and not self._depth
        self._turn.release()
        if is_due:
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
        with self._turn:
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
    """Makes a method wait for its turn and finish before the process dies of SIGTERM."""

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
