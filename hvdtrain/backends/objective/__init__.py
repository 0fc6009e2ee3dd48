"""Losses and metrics: what counts, and how a model is called."""
