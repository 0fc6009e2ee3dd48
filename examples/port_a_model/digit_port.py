"""A small classifier of digits, written in PyTorch, and its port to Keras in four stages.

`README.md` beside this file walks through them: each stage mends what `parity` found in the one before.
"""

import numpy as np
from sklearn.datasets import load_digits


class Naive:
    """The port as one writes it down at first. It trains, and learns something else than the original."""

    loss, metrics = "cross_entropy", {"accuracy": "accuracy"}
    defaults = {"epochs": 5, "batch_size": 16, "learning_rate": 0.05}
    pads_as_torch = permutes = False
    exact_gelu = False

    def train_data(self):
        digits = load_digits()
        return (digits.images[..., None] / 16).astype(np.float32), digits.target

    def eval_data(self):
        return None

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn import functional as F

        class Original(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
                self.hidden = nn.Linear(8 * 4 * 4, 64)
                self.logits = nn.Linear(64, 10)

            def forward(self, images: torch.Tensor) -> torch.Tensor:
                x = F.relu(self.conv(images.permute(0, 3, 1, 2)))
                return self.logits(F.gelu(self.hidden(x.flatten(1))))

        return Original()

    def tf_model(self):
        import keras
        from keras import layers

        images = x = keras.Input((8, 8, 1))
        if self.pads_as_torch:
            x = layers.ZeroPadding2D(1)(x)
        padding = "valid" if self.pads_as_torch else "same"
        x = layers.Conv2D(8, 3, strides=2, padding=padding, activation="relu", name="conv")(x)
        if self.permutes:
            x = layers.Permute((3, 1, 2))(x)
        x = layers.Dense(64, name="hidden")(layers.Flatten()(x))
        x = keras.ops.gelu(x, approximate=not self.exact_gelu)
        return keras.Model(images, layers.Dense(10, name="logits")(x))


class Padded(Naive):
    """With the padding of PyTorch's convolution."""

    pads_as_torch = True


class Permuted(Padded):
    """And flattened in PyTorch's order."""

    permutes = True


class Done(Permuted):
    """And with the GELU that PyTorch computes by default: the models are the same."""

    exact_gelu = True
