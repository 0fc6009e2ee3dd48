"""Tasks that the dry run refuses, for both frameworks; each changes one thing of the first."""

import numpy as np

INPUTS, CLASSES = 8, 3


class Sound:
    """A linear classifier of random numbers."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012
    defaults = {"batch_size": 16, "steps": 2, "device": "cpu"}  # noqa: RUF012
    width = INPUTS

    def arrays(self, count):
        random = np.random.RandomState(0)
        inputs = random.randn(count, INPUTS).astype(np.float32)
        return {"inputs": inputs, "targets": random.randint(0, CLASSES, count)}

    def train_data(self):
        return self.arrays(64)

    def eval_data(self):
        return self.arrays(32)

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(self.width, CLASSES))

    def tf_model(self):
        import keras

        inputs = keras.Input((self.width,))
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(inputs))


class WrongWidth(Sound):
    width = INPUTS + 1


class OwnLine(Sound):
    def loss(self, outputs, batch):
        return outputs.no_such_attribute


class Frozen(Sound):
    """All but the last layer keep their weights."""

    def torch_model(self):
        from torch import nn

        model = nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
        model[:2].requires_grad_(False)
        return model

    def tf_model(self):
        import keras

        layers = [keras.layers.Dense(5), keras.layers.BatchNormalization()]
        for layer in layers:
            layer.trainable = False
        return keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(CLASSES)])
