"""Built-in models: the PyTorch model and its Keras twin side by side, with the same portable names."""
