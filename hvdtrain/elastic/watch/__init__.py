"""Watching the workers of a job: heartbeats, and rules on who does not answer or makes no progress."""
