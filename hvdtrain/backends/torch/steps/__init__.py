"""The stages of a step in PyTorch, and a step of the task's own."""
