"""Sending a run to trackers: a thread of rank 0 follows what the run directory has."""
