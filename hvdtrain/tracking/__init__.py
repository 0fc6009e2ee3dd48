"""Sending a run to trackers: each is a reader of the run directory, in a process of its own."""
