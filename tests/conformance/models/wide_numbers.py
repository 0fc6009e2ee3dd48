"""Data of 64 bits: a model that has them trains in them; where 32 bits merge values, the job is refused."""

import numpy as np
from conformance.zoo import RANDOM, SAMPLES, Judge, Model, module

X = 1e8 + RANDOM.randn(SAMPLES, 3)
Y = ((X - 1e8) @ np.array([1.0, 2.0, 3.0]))[:, None]


class Wide(Model):
    """Coordinates around 1e8 that differ by about 1."""

    loss = "mse"
    judge = Judge(rtol=1e-7)

    def data(self, rows):
        return X[rows], Y[rows]

    def torch_model(self):
        import torch

        def forward(self, x):
            return self.head(x - 1e8)

        return module(forward, head=torch.nn.Linear(3, 1).double())

    def tf_model(self):
        import keras

        kind = {"dtype": "float64"}
        shift = keras.layers.Rescaling(1.0, -1e8, **kind)
        return keras.Sequential([keras.Input((3,), **kind), shift, keras.layers.Dense(1, **kind)])


class Narrow(Wide):
    """The same data and a model of 32 bits."""

    judge = Judge(workers=(1, 2), refused=("column 0 of 'inputs' of the training data", "become equal"))

    def torch_model(self):
        import torch

        return torch.nn.Linear(3, 1)

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


class LargeIds(Model):
    """Whole numbers above 2**31."""

    loss = "mse"

    def train_data(self):
        return (2**31 + 10 + np.arange(SAMPLES))[:, None], Y.astype(np.float32)

    def eval_data(self):
        return None

    def torch_model(self):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.nn.Embedding(SAMPLES, 1)
                with torch.no_grad():
                    self.table.weight.copy_(torch.arange(SAMPLES)[:, None] / 10)

            def forward(self, x):
                return self.table(x[:, 0] - 2**31 - 10)

        return Net()
