"""Labelled runs: a fault planted at a known step and role, or a healthy run that looks like one.

Written to be hard: every level wanders, every step is noisy, and the healthy kinds imitate each part of a
fault. What a detector scores on them says what it can see, not how often real runs show it.
"""

from __future__ import annotations

from gradscope.synthetic.curves import FALLING, STEADY, Curve, accuracy_curve
from gradscope.synthetic.gradients import CHANGES, HARMLESS, GradientSeries, gradient_series
from gradscope.synthetic.runs import KINDS, Truth, make_run, write_run

__all__ = [
    "CHANGES",
    "FALLING",
    "HARMLESS",
    "KINDS",
    "STEADY",
    "Curve",
    "GradientSeries",
    "Truth",
    "accuracy_curve",
    "gradient_series",
    "make_run",
    "write_run",
]
