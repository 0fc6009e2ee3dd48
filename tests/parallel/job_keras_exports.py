"""Models that exporting could get wrong: what comes of each form, checked in one process."""

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import pytest

from hvdtrain.backends.tensorflow.export import export_model
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

BATCH = 8


def statistics():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])


def heads():
    x = keras.Input((6,))
    return keras.Model(x, {"z": keras.layers.Dense(2)(x), "a": keras.layers.Dense(3)(x)})


def fixed():
    x = keras.Input((6,), batch_size=BATCH)
    return keras.Model(x, keras.layers.Dense(2)(keras.ops.reshape(x, (BATCH, 6))))


class Own(keras.Model):
    """A class that is not registered."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def own():
    model = Own()
    model(np.zeros((1, 6), "float32"))
    return model


def no_objective(model, batch):
    raise AssertionError("the model is called on its inputs")


def export(make_model, form):
    keras.utils.set_random_seed(1)
    arrays = {"inputs": np.random.RandomState(0).randn(1, BATCH, 6).astype("float32")}
    ones = np.ones((1, BATCH), "float32")
    batch = HostBatch(0, arrays, ones, float(BATCH), np.arange(BATCH)[None])
    path = Path(f"{make_model.__name__}{'.keras' if form == 'keras' else ''}")
    return export_model(make_model(), no_objective, form, path, batch)


for make in (statistics, heads):
    assert export(make, "keras").relative < 1e-5, make
    done = export(make, "saved-model")
    assert (done.relative < 1e-5, done.batch) == (True, "any batch size"), make
assert export(fixed, "saved-model").batch == "batches of 8 only"
assert export(own, "saved-model").relative < 1e-5
with pytest.raises(TaskError, match=r"Could not locate class 'Own'(.|\n)*--to saved-model"):
    export(own, "keras")
