"""Checkpoints: their files, their manifest, and the thread that writes them."""
