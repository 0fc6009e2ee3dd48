"""What the transformers share: their blocks in both frameworks, Keras's distributions, the check of sizes."""

from functools import partial
from typing import Any

from hvdtrain.errors import TaskError

EPSILONS = (1e-12, 1e-5)  # of layer norms: BERT's, and GPT-2's, which are causal


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
    return model


def check_heads(heads: int, channels: int) -> None:
    """Check that ``channels`` is a multiple of ``heads``."""
    if channels % heads:
        raise TaskError(
            f"{channels} channels cannot be divided among {heads} attention heads",
            "Make channels a multiple of heads.",
        )


def torch_block(heads: int, channels: int, dropout: float, is_causal: bool) -> Any:
    """Return the class of a block: causal ones have their norms first, as GPT-2, and others last, as BERT."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    check_heads(heads, channels)
    epsilon = EPSILONS[is_causal]

    class Block(nn.Module):
        recompute = True

        def __init__(self) -> None:
            super().__init__()
            # parameters have the order of the forward pass
            if is_causal:
                self.norm1 = nn.LayerNorm(channels, eps=epsilon)
            self.qkv = nn.Linear(channels, 3 * channels)
            self.projection = nn.Linear(channels, channels)
            if not is_causal:
                self.norm1 = nn.LayerNorm(channels, eps=epsilon)
            else:
                self.norm2 = nn.LayerNorm(channels, eps=epsilon)
            self.wide = nn.Linear(channels, 4 * channels)
            self.narrow = nn.Linear(4 * channels, channels)
            if not is_causal:
                self.norm2 = nn.LayerNorm(channels, eps=epsilon)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> Any:
            if is_causal:
                x = x + self.attend(self.norm1(x), seen)
                return x + self.widen(self.norm2(x))
            x = self.norm1(x + self.attend(x, seen))
            return self.norm2(x + self.widen(x))

        def attend(self, x: torch.Tensor, seen: torch.Tensor | None) -> Any:
            q, k, v = self.qkv(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, seen, is_causal=is_causal)
            return self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))

        def widen(self, x: torch.Tensor) -> Any:
            wide = F.gelu(self.wide(x), approximate="tanh" if is_causal else "none")
            return self.dropout(self.narrow(wide))

    return Block


def keras_block(name: str, heads: int, channels: int, dropout: float, is_causal: bool) -> Any:
    """Return the Keras twin of a block; one that is not causal takes which tokens are seen, too."""
    import keras
    from keras import layers, ops

    check_heads(heads, channels)
    norm = partial(layers.LayerNormalization, epsilon=EPSILONS[is_causal])
    inputs = x = keras.Input((None, channels))
    seen = None if is_causal else keras.Input((None,))
    mask = None if seen is None else ops.not_equal(seen[:, None, None, :], 0)
    y = layers.Dense(3 * channels, name="qkv")(norm(name="norm1")(x) if is_causal else x)
    split = layers.Reshape((-1, 3 * heads, channels // heads))(y)
    y = ops.dot_product_attention(*ops.split(split, 3, axis=2), mask=mask, is_causal=is_causal)
    y = layers.Reshape((-1, channels))(y)
    x = x + layers.Dropout(dropout)(layers.Dense(channels, name="projection")(y))
    y = norm(name="norm2")(x) if is_causal else (x := norm(name="norm1")(x))
    y = ops.gelu(layers.Dense(4 * channels, name="wide")(y), approximate=is_causal)
    x = x + layers.Dropout(dropout)(layers.Dense(channels, name="narrow")(y))
    x = x if is_causal else norm(name="norm2")(x)
    block = keras.Model(inputs if seen is None else [inputs, seen], x, name=name)
    block.recompute = True
    return block


def keras_positions(tokens: Any) -> Any:
    """Return the positions 0, 1, ... of tokens (batch, time), of shape (time,)."""
    from keras import ops

    return ops.cumsum(ops.ones_like(tokens[0])) - 1
