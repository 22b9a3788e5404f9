"""Units and thresholds of the capture score; docs/detectors.md says where they were calibrated."""

from __future__ import annotations

SHARE_UNIT = 0.8
ALIGNMENT_UNIT = 0.25
LENGTH_UNIT = 0.3
VIOLATION_UNIT = 0.10
CAPTURE = 0.75
POSSIBLE = 0.5
DOMINANCE = 1.0
SURE_DOMINANCE = 0.01
SURE_CAPTURE = 0.02
SURE_POSSIBLE = 0.05
"""How often at most reordered steps may change as much. Capture may be less rare than dominance: another
role's drift is evidence of its own."""
