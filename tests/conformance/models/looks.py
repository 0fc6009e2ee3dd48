"""What a plain loop computes wrongly without a word, and the dry run refuses."""

from typing import Any, ClassVar

import numpy as np
from conformance.zoo import Judge, Model, X

Y = X @ np.asarray([1, -2, 0.5, 1], np.float32)
BROADCASTS = "outputs are ("


def mean_of_rows(values: Any) -> Any:
    """Return the mean of each row, in either framework."""
    if hasattr(values, "detach"):
        return values.mean(1)
    import keras

    return keras.ops.mean(values, 1)


def right(outputs: Any, batch: Any) -> Any:
    """Return the square of the error of each sample."""
    return (outputs[:, 0] - batch["targets"]) ** 2


def broadcast(outputs: Any, batch: Any) -> Any:
    """Return the mean over all targets in place of the error of each sample."""
    return mean_of_rows((outputs - batch["targets"]) ** 2)


class Regression(Model):
    """One output, (n, 1), and targets (n,), which the loss compares rightly."""

    loss = staticmethod(right)

    def data(self, rows):
        return X[rows], Y[rows]

    def torch_model(self, outputs=1):
        import torch

        return torch.nn.Linear(4, outputs)

    def tf_model(self, outputs=1):
        import keras

        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(outputs)])


class BroadcastMetric(Regression):
    """The same in a metric, with a loss that is right."""

    judge = Judge(workers=(1, 2), refused=("the metric 'error' compares each sample with all", BROADCASTS))
    metrics: ClassVar = {"error": broadcast}


class MeanOfZeroHead(Regression):
    """A mean of the batch, of a model that computes 0 for all samples: nothing is broadcast."""

    judge = Judge(frameworks=("torch",), workers=(1,))

    def torch_model(self):
        model = super().torch_model()
        for parameter in model.parameters():
            parameter.data.zero_()
        return model

    @staticmethod
    def loss(outputs, batch):
        from hvdtrain import Weighted

        return Weighted(right(outputs, batch).mean(), len(outputs))
