"""What ``bench`` computes with TensorFlow."""
