"""What PyTorch tells of a model."""
