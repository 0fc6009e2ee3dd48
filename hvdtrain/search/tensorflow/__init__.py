"""What a search asks of TensorFlow."""
