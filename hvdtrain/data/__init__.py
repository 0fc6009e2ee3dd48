"""Data: wrapping what users have, the order of samples, and feeding batches ahead of the step."""
