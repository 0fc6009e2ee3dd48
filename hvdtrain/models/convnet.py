"""A small convolutional net for images: two convolutions, pooling, two dense layers.

Inputs are (batch, height, width, channels) in both frameworks; outputs are (batch, classes)
logits. For 8x8 images it has 151,306 parameters.

All of its functions are smooth (SiLU, average pooling). A rounding error can switch a ReLU or a
maximum, after which two runs that should agree differ visibly.
"""

from typing import Any

from hvdtrain.models.block import Block

CHANNELS = (32, 64)
HIDDEN = 128


def torch_model(image_shape: tuple[int, int, int], classes: int) -> Any:
    """Return the PyTorch model for images of a shape (height, width, channels), the first two even."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    height, width, channels = image_shape

    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, CHANNELS[0], 3, padding=1)
            self.conv2 = nn.Conv2d(CHANNELS[0], CHANNELS[1], 3, padding=1)
            self.dense1 = nn.Linear(height // 2 * (width // 2) * CHANNELS[1], HIDDEN)
            self.dense2 = nn.Linear(HIDDEN, classes)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.dense2(self.hide(self.pool(self.begin(images))))
            return logits

        def begin(self, images: torch.Tensor) -> torch.Tensor:
            x = images.permute(0, 3, 1, 2)  # a view, in memory channels_last, which suits convolutions
            return F.silu(self.conv1(x))

        def pool(self, x: torch.Tensor) -> torch.Tensor:
            return F.avg_pool2d(F.silu(self.conv2(x)), 2)

        def hide(self, x: torch.Tensor) -> torch.Tensor:
            x = x.permute(0, 2, 3, 1).flatten(1)  # the order in which Keras flattens
            return F.silu(self.dense1(x))

    return ConvNet()


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: one for each layer."""
    parts = ((model.begin, model.conv1), (model.pool, model.conv2), (model.hide, model.dense1))
    return [*(Block(*part) for part in parts), model.dense2]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: one for each layer with weights, and what leads to the next."""
    import keras

    conv1, dense1, dense2 = (model.get_layer(name) for name in ("conv1", "dense1", "dense2"))
    return [conv1, keras.Model(conv1.output, dense1.input), dense1, dense2]


def tf_model(image_shape: tuple[int, int, int], classes: int) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers

    images = keras.Input(image_shape)
    x = layers.Conv2D(CHANNELS[0], 3, padding="same", activation="silu", name="conv1")(images)
    x = layers.Conv2D(CHANNELS[1], 3, padding="same", activation="silu", name="conv2")(x)
    x = layers.Flatten()(layers.AveragePooling2D(2)(x))
    x = layers.Dense(HIDDEN, activation="silu", name="dense1")(x)
    return keras.Model(images, layers.Dense(classes, name="dense2")(x))
