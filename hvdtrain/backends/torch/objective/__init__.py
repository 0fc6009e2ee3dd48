"""Losses and metrics in PyTorch."""
