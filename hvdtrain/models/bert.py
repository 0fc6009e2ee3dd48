"""A BERT-style encoder of text, with a head for classification or for masked tokens.

Source: J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", 2019: layer norm after attention and after the dense layers, learned positions, GELU.
It has no token types. Inputs are (batch, time) token numbers, time at most ``context``; token 0 is
padding, to which no token attends. Outputs are logits, (batch, classes) or (batch, time, vocabulary).

In BERT-base's shape, (30522, 512, 12, 12, 768), embeddings, blocks and pooler have 109,480,704
parameters: BERT's 109,482,240 but for the two token types.
"""

from typing import Any

from hvdtrain.models.transformer import check_heads

EPSILON = 1e-12  # of layer norms


def torch_model(  # noqa: PLR0917 - sizes in their usual order
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    channels: int,
    classes: int | None = None,
    dropout: float = 0.1,
) -> Any:
    """Return the PyTorch model.

    Args:
        vocabulary: number of different tokens, padding included.
        context: largest number of tokens of a sample.
        layers: number of transformer blocks.
        heads: attention heads of a block; must divide ``channels``.
        channels: width of an embedding.
        classes: number of classes, predicted from the output of the first token; None for a head that
            predicts each token, with an output layer that shares the token embeddings.
        dropout: fraction of embeddings, attention outputs, dense outputs and inputs of the
            classification layer that training drops.
    """
    from hvdtrain.models.transformer import as_keras

    check_heads(heads, channels)
    return as_keras(_torch_bert(vocabulary, context, layers, heads, channels, classes, dropout))


def _torch_bert(  # noqa: PLR0917 - as above
    vocabulary: int, context: int, layers: int, heads: int, channels: int, classes: int | None, dropout: float
) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    Block = _torch_block(heads, channels, dropout)  # noqa: N806 - a class

    class BERT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, channels)
            self.positions = nn.Embedding(context, channels)
            self.norm = nn.LayerNorm(channels, eps=EPSILON)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(channels, channels)
            if classes is not None:
                self.logits = nn.Linear(channels, classes)
            else:
                self.head_norm = nn.LayerNorm(channels, eps=EPSILON)
                self.output_bias = nn.Embedding(vocabulary, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = self.attend(block, x)
            return self.predict(x)

        def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.dropout(self.norm(self.tokens(tokens.long()) + self.positions(positions)))
            # the first token is attended to even if it is padding: a softmax over nothing is NaN
            return x, ((tokens != 0) | (positions == 0))[:, None, None, :]

        def attend(
            self, block: nn.Module, value: tuple[torch.Tensor, torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return block(*value), value[1]

        def predict(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, _ = value
            if classes is not None:
                logits: torch.Tensor = self.logits(self.dropout(torch.tanh(self.head(x[:, 0]))))
                return logits
            x = self.head_norm(F.gelu(self.head(x)))
            return F.linear(x, self.tokens.weight) + self.output_bias.weight[:, 0]

    return BERT()


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: embedding, transformer blocks, head."""
    from functools import partial

    from hvdtrain.models.block import Block

    blocks = [Block(partial(model.attend, block), block) for block in model.blocks]
    embed = Block(model.embed, model.tokens, model.positions, model.norm, model.dropout)
    names = ("head", "dropout", "logits", "head_norm", "tokens", "output_bias")
    used = names[:3] if hasattr(model, "logits") else (names[0], *names[3:])
    return [embed, *blocks, Block(model.predict, *(getattr(model, name) for name in used))]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: embedding, transformer blocks, head."""
    from functools import partial

    from hvdtrain.models.block import Block, keras_blocks, keras_layers

    def attend(block: Any, value: list[Any]) -> list[Any]:
        return [block(value), value[1]]

    return keras_blocks(
        model, [Block(partial(attend, block), block) for block in keras_layers(model, "blocks")]
    )


def _torch_block(heads: int, channels: int, dropout: float) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        recompute = True

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(channels, 3 * channels)
            self.projection = nn.Linear(channels, channels)
            self.norm1 = nn.LayerNorm(channels, eps=EPSILON)
            self.wide = nn.Linear(channels, 4 * channels)
            self.narrow = nn.Linear(4 * channels, channels)
            self.norm2 = nn.LayerNorm(channels, eps=EPSILON)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
            x = self.norm1(x + self.dropout(self.projection(attended)))
            out: torch.Tensor = self.norm2(x + self.dropout(self.narrow(F.gelu(self.wide(x)))))
            return out

    return Block


def tf_model(  # noqa: PLR0917 - as above
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    channels: int,
    classes: int | None = None,
    dropout: float = 0.1,
) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers as kl
    from keras import ops

    from hvdtrain.models.block import keras_ends
    from hvdtrain.models.transformer import keras_positions

    check_heads(heads, channels)
    tokens = keras.Input((None,), dtype="int32")
    positions = keras_positions(tokens)
    embedding = kl.ReversibleEmbedding(vocabulary, channels, name="tokens")
    x = embedding(tokens) + kl.Embedding(context, channels, name="positions")(positions)
    x = kl.Dropout(dropout)(kl.LayerNormalization(epsilon=EPSILON, name="norm")(x))
    seen = ops.logical_or(ops.not_equal(tokens, 0), ops.equal(positions, 0))
    seen = ops.cast(seen, "float32")  # tf.recompute_grad takes no booleans
    ends = [x, seen], [x := _keras_blocks(layers, heads, channels, dropout)([x, seen]), seen]
    if classes is not None:
        x = kl.Dropout(dropout)(kl.Dense(channels, activation="tanh", name="head")(x[:, 0]))
        return keras_ends(keras.Model(tokens, kl.Dense(classes, name="logits")(x)), *ends)
    x = kl.Dense(channels, activation="gelu", name="head")(x)
    x = kl.LayerNormalization(epsilon=EPSILON, name="head_norm")(x)
    # Keras has no layer that is a bias alone; these are embeddings of width 1, times ones
    bias = kl.ReversibleEmbedding(vocabulary, 1, name="output_bias")
    logits = embedding(x, reverse=True) + bias(ops.ones_like(x[:, :, :1]), reverse=True)
    return keras_ends(keras.Model(tokens, logits), *ends)


def _keras_blocks(count: int, heads: int, channels: int, dropout: float) -> Any:
    import keras

    x, seen = keras.Input((None, channels)), keras.Input((None,))
    y = x
    for i in range(count):
        y = _keras_block(str(i), heads, channels, dropout)([y, seen])
    return keras.Model([x, seen], y, name="blocks")


def _keras_block(name: str, heads: int, channels: int, dropout: float) -> Any:
    import keras
    from keras import layers, ops

    from hvdtrain.models.transformer import keras_attention

    x, seen = keras.Input((None, channels)), keras.Input((None,))
    y = layers.Dense(3 * channels, name="qkv")(x)
    y = keras_attention(y, heads, ops.not_equal(seen[:, None, None, :], 0))
    y = layers.Dropout(dropout)(layers.Dense(channels, name="projection")(y))
    y = middle = layers.LayerNormalization(epsilon=EPSILON, name="norm1")(x + y)
    y = layers.Dense(4 * channels, activation="gelu", name="wide")(y)
    y = layers.Dropout(dropout)(layers.Dense(channels, name="narrow")(y))
    y = layers.LayerNormalization(epsilon=EPSILON, name="norm2")(middle + y)
    block = keras.Model([x, seen], y, name=name)
    block.recompute = True
    return block
