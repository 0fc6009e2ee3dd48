"""What TensorFlow tells of a model."""
