"""Which split a problem belongs to, and drawing generated problems of one split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random

from gradscope.errors import ConfigError, unknown_name

SPLITS = ("train", "held_out")
_HELD_OUT_SHARE = 0.2
_MAX_DRAWS = 10_000
_MAX_LENGTH = 9


def text_hash(text: str) -> int:
    """Returns a stable 64-bit number of a text."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def split_of(text: str) -> str:
    """Returns the split of a generated problem, decided by its text alone, so that splits never overlap."""
    return "held_out" if text_hash(text) < _HELD_OUT_SHARE * 2**64 else "train"


def check_place(split: str, index: int) -> None:
    """Refuses a split that does not exist and a negative index.

    Raises:
        UnknownNameError: There is no such split.
        ConfigError: The index is negative.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if index < 0:
        raise ConfigError(f"problem index {index} of split '{split}': allowed are 0 and above.")


def draw_text(draw: Callable[[Random], str], *, seed: int, split: str, index: int) -> str:
    """Returns the text that `draw` gives for (seed, split, index): the first one that is of that split."""
    check_place(split, index)
    random = Random(f"{seed}/{split}/{index}")
    for _ in range(_MAX_DRAWS):
        text = draw(random)
        if split_of(text) == split:
            return text
    raise ConfigError(f"no {split} problem in {_MAX_DRAWS} draws: this difficulty has too few. Raise it.")


def mixed_lengths(difficulty: int, spread: int, easy_weight: int, *, task: str, low: int) -> list[int]:
    """Returns the lengths that a generated task draws from, each as often as it comes in the list.

    Args:
        difficulty: The greatest length, `low` to 9.
        spread: How many lengths are mixed, those up to the greatest; none is under `low`.
        easy_weight: How often each shorter length comes for one time of the greatest.
        task: The task's name, for messages.
        low: The least length.

    Raises:
        ConfigError: One of them is no whole number of its range.
    """
    _check("difficulty", difficulty, task=task, low=low)
    _check("spread", spread, task=task, low=1)
    _check("easy_weight", easy_weight, task=task, low=1)
    shorter = list(range(max(low, difficulty - spread + 1), difficulty))
    return [*shorter * easy_weight, difficulty]


def _check(name: str, value: int, *, task: str, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MAX_LENGTH:
        raise ConfigError(
            f"{task}: {name} is {value!r}, allowed are whole numbers from {low} to {_MAX_LENGTH}."
        )
