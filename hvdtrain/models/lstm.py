"""A classifier of text: embedding, LSTM, and logits from the output at the last token.

Inputs are (batch, time) token numbers; token 0 is padding behind the text. Outputs are (batch,
classes) logits.

The LSTM has no biases: PyTorch adds two of them and both learn, so that training would differ
between the frameworks.
"""

from typing import Any


def torch_model(vocabulary: int, classes: int, channels: int = 128, layers: int = 1) -> Any:
    """Return the PyTorch model.

    Args:
        vocabulary: number of different tokens, padding included.
        classes: number of classes.
        channels: width of the embedding and of the LSTM.
        layers: number of LSTMs, one above the other.
    """
    import torch
    from torch import nn

    from hvdtrain.models.transformer import as_keras

    class LSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, channels)
            self.lstms = nn.ModuleList(
                nn.LSTM(channels, channels, bias=False, batch_first=True) for _ in range(layers)
            )
            self.logits = nn.Linear(channels, classes)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for lstm in self.lstms:
                x = self.read(lstm, x)
            return self.predict(x)

        def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.tokens(tokens.long()), tokens

        def read(
            self, lstm: nn.Module, value: tuple[torch.Tensor, torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return lstm(value[0])[0], value[1]

        def predict(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, tokens = value
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            last = ((tokens != 0) * positions).amax(1)
            logits: torch.Tensor = self.logits(x[torch.arange(x.shape[0], device=x.device), last])
            return logits

    return as_keras(LSTM())


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: embedding, LSTMs, output layer."""
    from functools import partial

    from hvdtrain.models.block import Block

    lstms = [Block(partial(model.read, lstm), lstm) for lstm in model.lstms]
    return [Block(model.embed, model.tokens), *lstms, Block(model.predict, model.logits)]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: embedding, LSTMs, output layer."""
    from functools import partial

    from hvdtrain.models.block import Block, keras_blocks, keras_layers

    def read(lstm: Any, value: list[Any]) -> list[Any]:
        return [lstm(value[0]), value[1]]

    return keras_blocks(model, [Block(partial(read, lstm), lstm) for lstm in keras_layers(model, "lstms")])


def tf_model(vocabulary: int, classes: int, channels: int = 128, layers: int = 1) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers as kl
    from keras import ops

    from hvdtrain.models.block import keras_ends
    from hvdtrain.models.transformer import keras_positions

    tokens = keras.Input((None,), dtype="int32")
    embedded = kl.Embedding(vocabulary, channels, name="tokens")(tokens)
    lstms = [kl.LSTM(channels, use_bias=False, return_sequences=True, name=str(i)) for i in range(layers)]
    read = keras.Sequential(lstms, name="lstms")(embedded)
    last = ops.max(ops.cast(ops.not_equal(tokens, 0), "int32") * keras_positions(tokens), axis=1)
    x = ops.take_along_axis(read, last[:, None, None], axis=1)[:, 0]
    model = keras.Model(tokens, kl.Dense(classes, name="logits")(x))
    return keras_ends(model, [embedded, tokens], [read, tokens])
