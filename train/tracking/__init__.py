"""Tracking: scalars of a run that goes on, told to trackers beside the run file."""
