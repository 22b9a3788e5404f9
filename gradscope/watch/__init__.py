"""Watching a run that grows: reads it again when its files change, and shows it in a terminal."""
