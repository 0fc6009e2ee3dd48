"""Models that exporting could get wrong, in each form."""

import os
from pathlib import Path
from types import SimpleNamespace

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import pytest
from support.exporting import floats, host_batches

from hvdtrain.backends.objective.model_call import Serving
from hvdtrain.backends.tensorflow.export import export_model
from hvdtrain.errors import TaskError


def statistics():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])


def heads():
    x = keras.Input((6,))
    return keras.Model(x, {"z": keras.layers.Dense(2)(x), "a": keras.layers.Dense(3)(x)})


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


def export(make_model, form):
    keras.utils.set_random_seed(1)
    path = Path(f"{make_model.__name__}{'.keras' if form == 'keras' else ''}")
    serving = Serving(SimpleNamespace(loss=lambda outputs, batch: 0), "tf", None)
    return export_model(make_model(), serving, form, path, host_batches(floats()))


for make in (statistics, heads):
    assert export(make, "keras").relative < 1e-5, make
    done = export(make, "saved-model")
    assert (done.relative < 1e-5, done.batch) == (True, "any batch size"), make
    assert done.inputs == ("inputs float32 (batch, 6)",)
assert sorted(done.outputs) == ["a (batch, 3)", "z (batch, 2)"]
assert export(own, "saved-model").relative < 1e-5
with pytest.raises(TaskError, match=r"Could not locate class 'Own'(.|\n)*--to saved-model"):
    export(own, "keras")
