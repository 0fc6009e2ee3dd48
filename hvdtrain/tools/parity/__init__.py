"""The command ``parity``: a task's two models side by side, in PyTorch and in TensorFlow."""
