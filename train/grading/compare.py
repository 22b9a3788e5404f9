"""Decides whether two bare answers are the same: by text, or as exact rational numbers."""

from __future__ import annotations

import re
from enum import Enum
from fractions import Fraction

_MAX_NUMBER_LENGTH = 200
_MAX_EXPONENT = 300
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e([-+]?\d{1,4}))?", re.IGNORECASE)
_LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))")
_RATIO = re.compile(r"([-+]?\d+)/(\d+)")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


class Verdict(Enum):
    """Whether two answers are the same."""

    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    UNDECIDED = "undecided"


def compare_answers(prediction: str, reference: str) -> Verdict:
    """Returns whether a predicted answer equals the reference; both are bare, without box or dollar signs.

    Numbers (integers with or without thousands commas, decimals, powers of ten, fractions, mixed numbers) are
    compared exactly, without tolerance. Other answers are EQUAL when their text is the same up to spacing,
    and UNDECIDED otherwise.
    """
    predicted, expected = _normalised(prediction), _normalised(reference)
    if not predicted:
        return Verdict.NOT_EQUAL if expected else Verdict.EQUAL
    if _spaceless(predicted) == _spaceless(expected):
        return Verdict.EQUAL
    predicted_number, expected_number = _as_number(predicted), _as_number(expected)
    if predicted_number is None or expected_number is None:
        return Verdict.UNDECIDED
    return Verdict.EQUAL if predicted_number == expected_number else Verdict.NOT_EQUAL


def _normalised(text: str) -> str:
    r"""Strips what carries no value: wrappers such as `\text{}`, spacing commands, one final full stop."""
    unwrapped = _WRAPPED.sub(r"\1", text)
    for command in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "$"):
        unwrapped = unwrapped.replace(command, "")
    return unwrapped.strip().removesuffix(".").strip()


def _spaceless(text: str) -> str:
    return "".join(text.split()).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _as_number(text: str) -> Fraction | None:
    """Returns the exact value of a plain number, or None for anything else (also for absurdly long ones)."""
    if len(text) > _MAX_NUMBER_LENGTH or not text.isascii():
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if match := _DECIMAL.fullmatch(text):
        return None if abs(int(match.group(1) or 0)) > _MAX_EXPONENT else Fraction(text)
    if match := _LATEX_FRACTION.fullmatch(text):
        sign, long_top, long_bottom, short_top, short_bottom = match.groups()
        return _ratio(sign, long_top or short_top, long_bottom or short_bottom)
    if match := _RATIO.fullmatch(text):
        return _ratio("", *match.groups())
    if match := _MIXED.fullmatch(text):
        sign, whole, top, bottom = match.groups()
        part = _ratio(sign, top, bottom)
        return None if part is None else part + (-int(whole) if sign == "-" else int(whole))
    return None


def _ratio(sign: str, top: str, bottom: str) -> Fraction | None:
    if int(bottom) == 0:
        return None
    return Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
