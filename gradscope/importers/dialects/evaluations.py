"""Evaluations with counts, one a row."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect


def dialect() -> Dialect:
    """Evaluations with counts: num_correct, num_total, in rows of their own."""
    return Dialect(
        rules={
            "num_correct": "num_correct",
            "num_total": "num_total",
            "accuracy": "eval_accuracy",
            "temperature": "temperature",
        }
    )
