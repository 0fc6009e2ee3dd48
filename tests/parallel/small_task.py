"""A small task of one's own, as a user would write it, for both frameworks."""

import os
import time

import numpy as np

INPUTS, OUTPUTS = 6, 2
GLOO_SECONDS = 15  # that a worker waits for others over Gloo, in the job of SlowToOpen


class Small:
    """Fit a random linear map."""

    loss = "mse"
    metrics = {"mae": "mae"}  # noqa: RUF012
    defaults = {"batch_size": 8, "learning_rate": 0.05, "epochs": 2, "log_every": 1}  # noqa: RUF012

    def __init__(self, samples=100):
        random = np.random.RandomState(3)
        inputs = random.randn(samples, INPUTS).astype("float32")
        self.data = inputs, inputs @ random.randn(INPUTS, OUTPUTS).astype("float32")

    def train_data(self):
        return self.data

    def eval_data(self):
        inputs, targets = self.data
        return {"inputs": inputs[:30], "targets": targets[:30]}

    def torch_model(self):
        from torch import nn

        return nn.Linear(INPUTS, OUTPUTS)

    def tf_model(self):
        import keras

        inputs = keras.Input((INPUTS,))
        return keras.Model(inputs, keras.layers.Dense(OUTPUTS, name="dense")(inputs))


class Branching(Small):
    """A model with a second branch, which only rank 0 takes."""

    @property
    def taken(self):
        return os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0"

    def torch_model(self):
        from torch import nn

        taken = self.taken

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk, self.branch = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS)

            def forward(self, x):
                return self.trunk(x) + self.branch(x) if taken else self.trunk(x)

        return Model()

    def tf_model(self):
        import keras

        taken = self.taken

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.trunk, self.branch = keras.layers.Dense(OUTPUTS), keras.layers.Dense(OUTPUTS)

            def build(self, shape):
                self.trunk.build(shape)
                self.branch.build(shape)
                super().build(shape)

            def call(self, x):
                return self.trunk(x) + self.branch(x) if taken else self.trunk(x)

        model = Model()
        model.build((None, INPUTS))
        return model


class SlowToOpen(Small):
    """Data that takes rank 1 longer to open than Gloo waits for a worker to start."""

    def train_data(self):
        if os.environ.get("HOROVOD_RANK") == "1":
            time.sleep(GLOO_SECONDS + 5)
        return super().train_data()


class UsesItsFramework(Small):
    """Data that is made with the framework that trains."""

    def train_data(self):
        import tensorflow as tf

        return tuple(tf.identity(array).numpy() for array in super().train_data())


class Changing(Small):
    """A model and a loss whose code changes between two jobs."""

    @staticmethod
    def loss(outputs, batch):
        errors = outputs - batch["targets"]
        return (abs(errors) if os.environ.get("CHANGED") == "loss" else errors**2)[:, 0]

    def torch_model(self):
        from torch import nn

        activation = nn.Tanh() if os.environ.get("CHANGED") == "model" else nn.ReLU()
        return nn.Sequential(nn.Linear(INPUTS, 8), activation, nn.Linear(8, OUTPUTS))

    def tf_model(self):
        import keras

        layers = keras.layers
        activation = "tanh" if os.environ.get("CHANGED") == "model" else "relu"
        inner = layers.Dense(8, activation=activation, name="0")
        return keras.Sequential([keras.Input((INPUTS,)), inner, layers.Dense(OUTPUTS, name="2")])
