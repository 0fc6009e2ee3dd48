"""Tables: columns go by name, not by position."""

import numpy as np
from conformance.zoo import RANDOM, SAMPLES, Judge, Model

COLUMNS = ["a", "b", "c"]
X = RANDOM.randn(SAMPLES, 3).astype(np.float32)
Y = (X @ np.array([[1.0], [5.0], [25.0]])).astype(np.float32)


def table(columns):
    return np.rec.fromarrays([X[:, COLUMNS.index(name)] for name in columns], names=",".join(columns))


class AnotherOrder(Model):
    """Evaluation data with their columns in another order."""

    loss = "mse"
    judge = Judge(
        workers=(1, 2), noted=("the columns of 'inputs' are put in the order of the training data",)
    )

    def train_data(self):
        return table("abc"), Y

    def eval_data(self):
        return table("cab"), Y

    def torch_model(self):
        import torch

        return torch.nn.Linear(3, 1)

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
