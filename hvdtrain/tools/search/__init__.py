"""Searching: a learning rate, a micro-batch, and the fields of a job by trials."""
