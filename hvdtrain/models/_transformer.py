"""What the transformers' Keras twins share, and the check of their sizes."""

from typing import Any

from hvdtrain.errors import TaskError


def check_heads(heads: int, channels: int) -> None:
    """Check that the heads share the channels evenly.

    Raises:
        TaskError: where they do not.
    """
    if channels % heads:
        raise TaskError(
            f"{heads} attention heads cannot share {channels} channels evenly",
            "Choose channels that are a multiple of heads.",
        )


def keras_attention(qkv: Any, heads: int, mask: Any = None, is_causal: bool = False) -> Any:
    """Attend within sequences.

    Args:
        qkv: queries, keys and values, (batch, time, 3 * channels).
        heads: number of heads.
        mask: what may be looked at, broadcast to (batch, heads, time, time).
        is_causal: whether a token sees only those before it and itself.

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
    """Count the tokens of (batch, time): 0, 1, ... as (time,)."""
    from keras import ops

    return ops.cumsum(ops.ones_like(tokens[0])) - 1
