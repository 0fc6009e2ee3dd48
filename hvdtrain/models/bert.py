"""A BERT-style encoder of text, with a head for classification.

Source: J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", 2019: layer norm after attention and after the dense layers, learned positions, GELU.
It has no token types. Inputs are (batch, time) token numbers, time at most ``context``; token 0 is
padding, to which no token attends. Outputs are logits, (batch, classes), from the first token's output.

In BERT-base's shape, (30522, 512, 12, 12, 768), embeddings, blocks and pooler have 109,480,704
parameters: BERT's 109,482,240 but for the two token types.
"""

from functools import partial
from typing import Any

from hvdtrain.models.block import Block, keras_blocks, keras_ends, keras_layers
from hvdtrain.models.transformer import EPSILONS, as_keras, keras_block, keras_positions, torch_block

EPSILON = EPSILONS[False]


def torch_model(  # noqa: PLR0917 - sizes in their usual order
    vocabulary: int, context: int, layers: int, heads: int, channels: int, classes: int, dropout: float = 0.1
) -> Any:
    """Return the PyTorch model."""
    import torch
    from torch import nn

    make_block = torch_block(heads, channels, dropout, is_causal=False)
    Pair = tuple[torch.Tensor, torch.Tensor]  # noqa: N806 - the activations, and which tokens are seen

    class BERT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, channels)
            self.positions = nn.Embedding(context, channels)
            self.norm = nn.LayerNorm(channels, eps=EPSILON)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(make_block() for _ in range(layers))
            self.head = nn.Linear(channels, channels)
            self.logits = nn.Linear(channels, classes)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = self.attend(block, x)
            return self.predict(x)

        def embed(self, tokens: torch.Tensor) -> Pair:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.dropout(self.norm(self.tokens(tokens.long()) + self.positions(positions)))
            # the first token is attended to even if it is padding: a softmax over nothing is NaN
            return x, ((tokens != 0) | (positions == 0))[:, None, None, :]

        def attend(self, block: nn.Module, value: Pair) -> Pair:
            return block(*value), value[1]

        def predict(self, value: Pair) -> torch.Tensor:
            logits: torch.Tensor = self.logits(self.dropout(torch.tanh(self.head(value[0][:, 0]))))
            return logits

    return as_keras(BERT())


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: embedding, transformer blocks, head."""
    embed = Block(model.embed, model.tokens, model.positions, model.norm, model.dropout)
    blocks = [Block(partial(model.attend, block), block) for block in model.blocks]
    return [embed, *blocks, Block(model.predict, model.head, model.dropout, model.logits)]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: embedding, transformer blocks, head."""

    def attend(block: Any, value: list[Any]) -> list[Any]:
        return [block(value), value[1]]

    return keras_blocks(
        model, [Block(partial(attend, block), block) for block in keras_layers(model, "blocks")]
    )


def tf_model(  # noqa: PLR0917 - as above
    vocabulary: int, context: int, layers: int, heads: int, channels: int, classes: int, dropout: float = 0.1
) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers as kl
    from keras import ops

    tokens = keras.Input((None,), dtype="int32")
    positions = keras_positions(tokens)
    x = kl.Embedding(vocabulary, channels, name="tokens")(tokens)
    x = x + kl.Embedding(context, channels, name="positions")(positions)
    x = kl.Dropout(dropout)(kl.LayerNormalization(epsilon=EPSILON, name="norm")(x))
    seen = ops.logical_or(ops.not_equal(tokens, 0), ops.equal(positions, 0))
    seen = ops.cast(seen, "float32")  # tf.recompute_grad takes no booleans
    inputs = [keras.Input((None, channels)), keras.Input((None,))]
    y = inputs[0]
    for i in range(layers):
        y = keras_block(str(i), heads, channels, dropout, is_causal=False)([y, inputs[1]])
    read = keras.Model(inputs, y, name="blocks")([x, seen])
    y = kl.Dropout(dropout)(kl.Dense(channels, activation="tanh", name="head")(read[:, 0]))
    return keras_ends(keras.Model(tokens, kl.Dense(classes, name="logits")(y)), [x, seen], [read, seen])
