"""Tasks that the dry run refuses, for both frameworks; each changes one thing of the first."""

import numpy as np

INPUTS, CLASSES = 8, 3


class Sound:
    """A linear classifier of random numbers."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012
    defaults = {"batch_size": 16, "steps": 2, "device": "cpu"}  # noqa: RUF012
    width, classes, last = INPUTS, CLASSES, None

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

        ends = {None: [], "softmax": [nn.Softmax(-1)], "sigmoid": [nn.Sigmoid()]}
        return nn.Sequential(nn.Linear(self.width, self.classes), *ends[self.last])

    def tf_model(self):
        import keras

        inputs = keras.Input((self.width,))
        return keras.Model(inputs, keras.layers.Dense(self.classes, activation=self.last)(inputs))


class Softmax(Sound):
    last = "softmax"


class Sigmoid(Sound):
    loss, metrics, last, classes = "binary_cross_entropy", {}, "sigmoid", 1

    def arrays(self, count):
        return {**super().arrays(count), "targets": np.ones((count, 1), np.float32)}


class FewOutputs(Sound):
    classes = 2


class WrongWidth(Sound):
    width = INPUTS + 1


class OwnLine(Sound):
    def loss(self, outputs, batch):
        return outputs.no_such_attribute


class Unreadable(Sound):
    class Samples:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index:
                raise ValueError("cannot decode")
            return {"inputs": np.zeros(INPUTS, np.float32), "targets": 0}

    def train_data(self):
        return self.Samples()


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
