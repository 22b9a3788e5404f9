"""Mechanism figures of recorded runs, one file a figure.

A figure is `draw(runs) -> Drawing`: the matplotlib Figure in final paper size and the table of the numbers in
it. It shows nothing, leaves matplotlib's settings alone, and raises `NothingToDrawError` with a reason where
the runs lack what it reads.
"""

from __future__ import annotations

from gradscope.registry import Registry

FIGURES = Registry(
    "figure",
    {
        "accuracy": "gradscope.figures.accuracy:draw",
        "gradient_norms": "gradscope.figures.gradient_norms:draw",
        "shares": "gradscope.figures.shares:draw",
        "amplification": "gradscope.figures.amplification:draw",
        "alignment": "gradscope.figures.alignment:draw",
    },
)
