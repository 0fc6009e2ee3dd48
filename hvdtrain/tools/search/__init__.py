"""Searching: a learning rate, and a micro-batch."""
