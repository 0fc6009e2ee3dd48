"""Losses and metrics in TensorFlow."""
