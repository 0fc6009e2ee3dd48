"""Tasks with metrics of a whole evaluation, for both frameworks; their rows are left in files."""

import numpy as np

import hvdtrain

SAMPLES, LENGTH, INPUTS, CLASSES = 53, 4, 6, 5
RANDOM = np.random.RandomState(7)


def rows_of(outputs, batch):
    return {"outputs": outputs, "targets": batch["targets"], "inputs": batch["inputs"]}


def kept(name):
    """Return a compute that writes the rows to a file, and returns a number that depends on their order."""

    def compute(rows):
        np.savez(f"{name}.npz", **rows)
        return rows["inputs"].reshape(len(rows["inputs"]), -1)[:, 0] @ np.arange(len(rows["inputs"]))

    return compute


class Tokens:
    """Classes of tokens, some of which do not count."""

    loss = "cross_entropy"
    metrics = {  # noqa: RUF012
        "f1": "f1",
        "accuracy": "accuracy",
        "mean_iou": "mean_iou",
        "precision": "precision",
        "recall": "recall",
        "auc": "auc",
        "largest": hvdtrain.SumMetric(
            lambda outputs, batch: {"inputs": batch["inputs"]}, lambda sums: sums["inputs"].max()
        ),
        "rows": hvdtrain.GatheredMetric(rows_of, kept("Tokens")),
    }
    defaults = {"batch_size": 8, "eval_batch_size": 8, "steps": 4, "eval_every": 1}  # noqa: RUF012
    outputs = CLASSES
    inputs = (LENGTH, INPUTS)
    data = (
        RANDOM.randn(SAMPLES, LENGTH, INPUTS).astype(np.float32),
        np.where(RANDOM.rand(SAMPLES, LENGTH) < 0.3, -100, RANDOM.randint(0, CLASSES, (SAMPLES, LENGTH))),
    )

    def train_data(self):
        return self.data

    def eval_data(self):
        return self.data

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, self.outputs))

    def tf_model(self):
        import keras

        inputs = keras.Input(self.inputs)
        return keras.Model(inputs, keras.layers.Dense(self.outputs, name="0")(inputs))


class Numbers(Tokens):
    """Numbers that are far from 0, as seen by R2."""

    loss = "mse"
    metrics = {"r2": "r2", "rows": hvdtrain.GatheredMetric(rows_of, kept("Numbers"))}  # noqa: RUF012
    inputs, outputs = (INPUTS,), 2
    data = (
        RANDOM.randn(SAMPLES, INPUTS).astype(np.float32),
        (RANDOM.randn(SAMPLES, 2) + 1000).astype(np.float32),
    )


def of_batch_mean(outputs, batch):
    errors = (outputs - batch["targets"]) ** 2
    if hasattr(errors, "mean"):
        return hvdtrain.Weighted(errors.mean(), float(len(errors)))
    import tensorflow as tf

    return hvdtrain.Weighted(tf.reduce_mean(errors), tf.cast(tf.shape(errors)[0], tf.float32))


class OfBatchMean(Numbers):
    """A loss that is the mean of a batch: its padding is left out before the model is called."""

    loss = staticmethod(of_batch_mean)
    metrics = {"rows": hvdtrain.GatheredMetric(rows_of, kept("OfBatchMean"))}  # noqa: RUF012


class Wide(Numbers):
    """Rows that take more memory than they may."""

    metrics = {"rows": hvdtrain.GatheredMetric(rows_of, kept("Wide"), max_bytes=2000)}  # noqa: RUF012
