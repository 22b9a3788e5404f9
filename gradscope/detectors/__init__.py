"""Detectors: each looks for one thing in a run and says in sentences what it saw.

A detector is `detect(run) -> list[Finding]`, one `Finding` for each thing it looked at (strength `none` where
nothing was seen); it raises `Skipped` with a reason where the run lacks what it reads.
"""

from __future__ import annotations

from gradscope.registry import Registry

DETECTORS = Registry(
    "detector",
    {
        "cliff": "gradscope.detectors.cliff:detect",
        "capture": "gradscope.detectors.capture:detect",
        "amplification": "gradscope.detectors.amplification:detect",
        "signal": "gradscope.detectors.signal:detect",
    },
)
