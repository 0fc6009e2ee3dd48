"""Initial values of the PyTorch models: Keras's distributions."""

from typing import Any


def as_keras(model: Any) -> Any:
    """Initialise a PyTorch model's parameters from Keras's distributions, and return the model.

    PyTorch initialises embeddings with values so large that an output layer that shares them starts
    far from a uniform prediction. ``initial_parameters: portable`` uses the same distributions as this.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -0.05, 0.05)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LSTM):
            for name, weights in module.named_parameters():
                (nn.init.xavier_uniform_ if "ih" in name else nn.init.orthogonal_)(weights)
    return model
