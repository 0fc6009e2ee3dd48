"""What a search asks of PyTorch."""
