"""Keras models whose outputs have a mask, which ``model.fit`` applies to losses and metrics."""

from typing import ClassVar

import numpy as np
from conformance.zoo import Judge, Model

RANDOM = np.random.RandomState(0)
LENGTHS = RANDOM.randint(1, 7, 25)
WORDS = np.where(np.arange(6) < LENGTHS[:, None], RANDOM.randint(1, 10, (25, 6)), 0)
TAGS = np.where(WORDS > 5, 1, 0)


class Tagger(Model):
    """An embedding masks zeros."""

    metrics: ClassVar = {"accuracy": "accuracy", "f1": "f1"}
    outputs = 2

    def data(self, rows):
        return WORDS[rows], self.targets(TAGS[rows])

    def targets(self, tags):
        return tags.copy()

    def tf_model(self):
        import keras

        layers = keras.layers
        hidden = layers.Embedding(10, 4, mask_zero=True), layers.LSTM(5, return_sequences=True)
        return keras.Sequential([keras.Input((6,), dtype="int32"), *hidden, layers.Dense(self.outputs)])


class TaggerOfObjects(Tagger):
    """A loss and a metric that are Keras's objects."""

    def __init__(self):
        import keras

        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        self.metrics = {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


class Regression(Tagger):
    """A number for each step."""

    loss = "mse"
    metrics: ClassVar = {"error": "mae"}
    outputs = 3

    def targets(self, tags):
        return np.stack([tags, tags * 2, 1 - tags], -1).astype(np.float32)


class OwnLoss(Tagger):
    """A function that does not apply the mask, as in a loop of one's own."""

    judge = Judge(noted=("have a Keras mask", "outputs._keras_mask"))
    metrics: ClassVar = {}

    def loss(self, outputs, batch):
        import keras

        losses = keras.losses.sparse_categorical_crossentropy(batch["targets"], outputs, from_logits=True)
        return keras.ops.mean(losses, 1)
