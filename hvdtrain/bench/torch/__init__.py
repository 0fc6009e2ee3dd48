"""What ``bench`` computes with PyTorch."""
