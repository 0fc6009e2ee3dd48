"""A GPT-style language model: a transformer decoder that predicts each next token.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2):
layer norm before attention and before the dense layers, learned positions, GELU by its tanh formula,
biases, and an output layer that shares the token embeddings. Inputs are (batch, time) token
numbers, time at most ``context``; outputs (batch, time, vocabulary) logits. In GPT-2's smallest
shape, (50257, 1024, 12, 12, 768), it has 124,439,808 parameters.
"""

from typing import Any

from hvdtrain.models.block import Block, keras_blocks, keras_ends, keras_layers
from hvdtrain.models.transformer import EPSILONS, as_keras, keras_block, keras_positions, torch_block

EPSILON = EPSILONS[True]


def torch_model(  # noqa: PLR0917 - sizes in their usual order
    vocabulary: int, context: int, layers: int, heads: int, channels: int, dropout: float = 0.0
) -> Any:
    """Return the PyTorch model."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    make_block = torch_block(heads, channels, dropout, is_causal=True)

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, channels)
            self.positions = nn.Embedding(context, channels)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(make_block() for _ in range(layers))
            self.norm = nn.LayerNorm(channels, eps=EPSILON)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.predict(x)

        def embed(self, tokens: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x: torch.Tensor = self.dropout(self.tokens(tokens.long()) + self.positions(positions))
            return x

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.norm(x), self.tokens.weight)

    return as_keras(GPT())


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: embedding, transformer blocks, output layer."""
    embed = Block(model.embed, model.tokens, model.positions, model.dropout)
    return [embed, *model.blocks, Block(model.predict, model.norm, model.tokens)]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: embedding, transformer blocks, output layer."""
    return keras_blocks(model, keras_layers(model, "blocks"))


def tf_model(  # noqa: PLR0917 - as above
    vocabulary: int, context: int, layers: int, heads: int, channels: int, dropout: float = 0.0
) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers as kl

    tokens = keras.Input((None,), dtype="int32")
    embedding = kl.ReversibleEmbedding(vocabulary, channels, name="tokens")
    x = embedding(tokens) + kl.Embedding(context, channels, name="positions")(keras_positions(tokens))
    x = kl.Dropout(dropout)(x)
    blocks = [keras_block(str(i), heads, channels, dropout, is_causal=True) for i in range(layers)]
    y = keras.Sequential(blocks, name="blocks")(x)
    logits = embedding(kl.LayerNormalization(epsilon=EPSILON, name="norm")(y), reverse=True)
    return keras_ends(keras.Model(tokens, logits), x, y)
