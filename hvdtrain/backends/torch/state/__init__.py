"""PyTorch's models and optimizers as portable state."""
