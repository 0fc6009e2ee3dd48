"""Sending a run to trackers while it trains, and later by the command ``track``."""
