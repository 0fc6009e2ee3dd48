"""Tasks whose metrics are objects of torchmetrics and Keras."""

import numpy as np

import hvdtrain

SAMPLES, INPUTS = 53, 6
RANDOM = np.random.RandomState(11)


def rows_kept(name):
    """Return a metric that writes outputs and targets of all samples to a file."""

    def compute(rows):
        np.savez(f"{name}.npz", **rows)
        return len(rows["outputs"])

    return hvdtrain.GatheredMetric(
        lambda outputs, batch: {"outputs": outputs, "targets": batch["targets"]}, compute
    )


def of_torch(make):
    """Return a function that makes an object of torchmetrics."""

    def made():
        import torchmetrics

        return make(torchmetrics)

    return made


def of_keras(make):
    """Return a function that makes an object of Keras."""

    def made():
        import keras

        return make(keras.metrics)

    return made


class Answers:
    """Yes or no."""

    loss = "binary_cross_entropy"
    metrics = {  # noqa: RUF012
        "accuracy": "binary_accuracy",
        "auroc": hvdtrain.MetricObject(
            torch=of_torch(lambda library: library.classification.BinaryAUROC()),
            tf=of_keras(lambda library: library.AUC(num_thresholds=50)),
        ),
        "rows": rows_kept("Answers"),
        "rank": hvdtrain.MetricObject(
            torch=of_torch(lambda library: library.regression.PearsonCorrCoef()),
            tf=of_keras(lambda library: library.MeanAbsoluteError()),
            targets=lambda outputs, batch: batch["inputs"][:, 0],
            preds=lambda outputs, batch: outputs[:, 0],
        ),
    }
    defaults = {"batch_size": 8, "eval_batch_size": 8, "steps": 3, "eval_every": 1}  # noqa: RUF012
    data = (RANDOM.randn(SAMPLES, INPUTS).astype(np.float32), (RANDOM.rand(SAMPLES) < 0.4).astype(np.float32))

    def train_data(self):
        return self.data

    def eval_data(self):
        return self.data

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, 1))

    def tf_model(self):
        import keras

        inputs = keras.Input((INPUTS,))
        return keras.Model(inputs, keras.layers.Dense(1, name="0")(inputs))
