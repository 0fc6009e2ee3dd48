"""Keras models and losses that compute with the batch size as a Python int, which fit() knows."""

import numpy as np
from conformance.zoo import RANDOM, Judge, Model

SEQUENCES = RANDOM.randn(25, 5, 4).astype(np.float32)


class Reshapes(Model):
    """``call()`` takes batch, time and channels of the shape; the loss is a function of the task's."""

    def data(self, rows):
        return SEQUENCES[rows], (np.arange(25) % 3)[rows]

    def loss(self, outputs, batch):
        import keras

        return keras.ops.sparse_categorical_crossentropy(batch["targets"], outputs, from_logits=True)

    def tf_model(self):
        import keras

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(3)

            def call(self, x):
                b, t, c = x.shape
                return self.dense(keras.ops.reshape(keras.ops.tanh(x), (b, t * c)))

        model = Net()
        model(np.zeros((2, 5, 4), np.float32))
        return model


class Counts(Reshapes):
    """The loss itself does, and micro-batches of 9, 9 and 7, or of 7 and 6 samples."""

    judge = Judge(workers=(1, 2), options=("--accumulate", "3"))

    def tf_loss(self, model, batch):
        import tensorflow as tf

        n = batch["inputs"].shape[0]
        losses = self.loss(model(batch["inputs"]), batch)
        assert n is not None
        return losses, {"accuracy": tf.ones([n])}
