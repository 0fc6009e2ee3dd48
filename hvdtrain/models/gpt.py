"""A GPT-style language model: a transformer decoder that predicts each next token.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2):
layer norm before attention and before the dense layers, learned positions, GELU by its tanh formula,
biases, and an output layer that shares the token embeddings. Inputs are (batch, time) token
numbers, time at most ``context``; outputs (batch, time, vocabulary) logits. In GPT-2's smallest
shape, (50257, 1024, 12, 12, 768), it has 124,439,808 parameters.
"""

from typing import Any

from hvdtrain.models.transformer import check_heads

EPSILON = 1e-5  # of layer norms


def torch_model(  # noqa: PLR0917 - sizes in their usual order
    vocabulary: int, context: int, layers: int, heads: int, channels: int, dropout: float = 0.0
) -> Any:
    """Return the PyTorch model.

    Args:
        vocabulary: number of different tokens.
        context: largest number of tokens of a sample.
        layers: number of transformer blocks.
        heads: attention heads of a block; must divide ``channels``.
        channels: width of an embedding.
        dropout: fraction of embeddings, attention outputs and dense outputs that training drops.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    from hvdtrain.models.transformer import as_keras

    check_heads(heads, channels)
    Block = _torch_block(heads, channels, dropout)  # noqa: N806 - a class

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, channels)
            self.positions = nn.Embedding(context, channels)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
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
    from hvdtrain.models.block import Block

    embed = Block(model.embed, model.tokens, model.positions, model.dropout)
    return [embed, *model.blocks, Block(model.predict, model.norm, model.tokens)]


def _torch_block(heads: int, channels: int, dropout: float) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        recompute = True

        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(channels, eps=EPSILON)
            self.qkv = nn.Linear(channels, 3 * channels)
            self.projection = nn.Linear(channels, channels)
            self.norm2 = nn.LayerNorm(channels, eps=EPSILON)
            self.wide = nn.Linear(channels, 4 * channels)
            self.narrow = nn.Linear(4 * channels, channels)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.dropout(self.projection(self.attend(self.qkv(self.norm1(x)))))
            wide = F.gelu(self.wide(self.norm2(x)), approximate="tanh")
            out: torch.Tensor = x + self.dropout(self.narrow(wide))
            return out

        def attend(self, qkv: torch.Tensor) -> torch.Tensor:
            parts = qkv.unflatten(2, (3, heads, -1))  # type: ignore[no-untyped-call]
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    return Block


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: embedding, transformer blocks, output layer."""
    from hvdtrain.models.block import keras_blocks, keras_layers

    return keras_blocks(model, keras_layers(model, "blocks"))


def tf_model(  # noqa: PLR0917 - as above
    vocabulary: int, context: int, layers: int, heads: int, channels: int, dropout: float = 0.0
) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers as kl
    from keras import ops

    from hvdtrain.models.block import keras_ends
    from hvdtrain.models.transformer import keras_attention, keras_positions

    check_heads(heads, channels)

    def block(name: str) -> Any:
        inputs = x = keras.Input((None, channels))
        y = kl.LayerNormalization(epsilon=EPSILON, name="norm1")(x)
        y = keras_attention(kl.Dense(3 * channels, name="qkv")(y), heads, is_causal=True)
        x = x + kl.Dropout(dropout)(kl.Dense(channels, name="projection")(y))
        y = kl.LayerNormalization(epsilon=EPSILON, name="norm2")(x)
        y = ops.gelu(kl.Dense(4 * channels, name="wide")(y), approximate=True)
        x = x + kl.Dropout(dropout)(kl.Dense(channels, name="narrow")(y))
        model = keras.Model(inputs, x, name=name)
        model.recompute = True
        return model

    tokens = keras.Input((None,), dtype="int32")
    embedding = kl.ReversibleEmbedding(vocabulary, channels, name="tokens")
    x = embedding(tokens) + kl.Embedding(context, channels, name="positions")(keras_positions(tokens))
    x = kl.Dropout(dropout)(x)
    y = keras.Sequential([block(str(i)) for i in range(layers)], name="blocks")(x)
    logits = embedding(kl.LayerNormalization(epsilon=EPSILON, name="norm")(y), reverse=True)
    return keras_ends(keras.Model(tokens, logits), x, y)
