"""Random numbers that are no framework's or of no SeedGenerator: a resumed job draws those of a whole one."""

import random

import numpy as np
from conformance.zoo import Judge, Model, module


class InForward(Model):
    """Masks of the inputs and layers left out, drawn by numpy and Python."""

    judge = Judge(draws=True)

    def torch_model(self):
        import torch
        from torch import nn

        def forward(self, x):
            if self.training:
                x = x * torch.from_numpy((np.random.rand(*x.shape) > 0.3).astype("float32"))
            return self.head(x if self.training and random.random() < 0.5 else self.first(x))

        return module(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 3))


class KerasGlobal(Model):
    """keras.random without a seed."""

    judge = Judge(draws=True)

    def drawn(self, shape):
        import keras

        return keras.random.uniform(shape)

    def tf_model(self):
        import keras

        draw = self.drawn

        class Noise(keras.layers.Layer):
            def call(self, x, training=False):
                return x * draw(keras.ops.shape(x)) if training else x

        return keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(3)])


class InNumpyFunction(KerasGlobal):
    """numpy in a function that the graph calls."""

    def drawn(self, shape):
        import tensorflow as tf

        drawn = tf.numpy_function(lambda: np.random.rand(4).astype("float32"), [], tf.float32)
        return tf.ensure_shape(drawn, (4,))


class WhenTraced(KerasGlobal):
    """numpy draws when the step is traced."""

    judge = Judge(draws=True, noted=("numpy or Python: a step is traced once", "SeedGenerator"))

    def drawn(self, shape):
        return np.random.rand(4).astype("float32")


class OfTensorFlow(KerasGlobal):
    """A generator that a step cannot seed."""

    judge = Judge(draws=True, noted=("draw from tf.random: a resumed run draws other numbers",), rtol=2.0)

    def drawn(self, shape):
        import tensorflow as tf

        return tf.random.uniform(shape)


class InCollate(Model):
    """A batch function that draws: of a column that the model does not take, so the losses are a loop's."""

    judge = Judge(
        frameworks=("torch",), workers=(2,), noted=("training data again gives another 'noise'", "mixup")
    )

    def train_data(self):
        return dict(zip(("inputs", "targets"), super().train_data(), strict=True))

    def train_collate(self, samples):
        columns = {key: np.stack([sample[key] for sample in samples]) for key in ("inputs", "targets")}
        return {**columns, "noise": np.random.rand(len(samples)).astype("float32")}

    def torch_model(self):
        import torch

        return torch.nn.Linear(4, 3)
