"""What each role's gradients moved: an optimizer's applied change as a sum of contributions."""

from gradscope.probes.attribution.settings import Attribution

__all__ = ["Attribution"]
