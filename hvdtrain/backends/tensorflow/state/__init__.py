"""Keras's models and optimizers as portable state."""
