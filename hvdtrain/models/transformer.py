"""Parts that the transformers' Keras twins share, and the check of their sizes."""

from typing import Any

from hvdtrain.errors import TaskError


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


def check_heads(heads: int, channels: int) -> None:
    """Check that ``channels`` is a multiple of ``heads``.

    Raises:
        TaskError: If it is not.
    """
    if channels % heads:
        raise TaskError(
            f"{channels} channels cannot be divided among {heads} attention heads",
            "Make channels a multiple of heads.",
        )


def keras_attention(qkv: Any, heads: int, mask: Any = None, is_causal: bool = False) -> Any:
    """Return self-attention within sequences.

    Args:
        qkv: queries, keys and values, (batch, time, 3 * channels).
        heads: number of heads.
        mask: true for positions to attend to, broadcast to (batch, heads, time, time).
        is_causal: whether a token attends only to itself and the tokens before it.

    Returns:
        (batch, time, channels).
    """
    from keras import layers, ops

    channels = qkv.shape[-1] // 3
    split = layers.Reshape((-1, 3 * heads, channels // heads))(qkv)
    query, key, value = ops.split(split, 3, axis=2)
    attended = ops.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)
    return layers.Reshape((-1, channels))(attended)


def keras_positions(tokens: Any) -> Any:
    """Return the positions 0, 1, ... of tokens (batch, time), of shape (time,)."""
    from keras import ops

    return ops.cumsum(ops.ones_like(tokens[0])) - 1
