"""The stages of a step in TensorFlow, and a step of the task's own."""
