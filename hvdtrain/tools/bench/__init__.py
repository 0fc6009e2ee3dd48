"""Measuring jobs: how long steps take and why, how they scale, and how other programs do the same work."""
