"""Checks of the options that a user gives a workflow."""

from __future__ import annotations

from typing import get_args

from gradscope.errors import ConfigError, nearest
from gradscope.train.episode import Style


def check_style(style: str) -> None:
    """Refuses a prompt style that does not exist.

    Raises:
        ConfigError: The style is not one of `Style`.
    """
    allowed = get_args(Style)
    if style not in allowed:
        raise ConfigError(
            f"workflow.style is {style!r}.{nearest(str(style), allowed)} Allowed: {', '.join(allowed)}."
        )


def check_count(name: str, value: int, *, low: int = 1, high: int = 9) -> None:
    """Refuses a count that is no whole number of the allowed range.

    Raises:
        ConfigError: It is outside `low` to `high`, both allowed.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"workflow.{name} is {value!r}, allowed are whole numbers from {low} to {high}.")
