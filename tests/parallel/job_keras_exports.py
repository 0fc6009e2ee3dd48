"""Models that exporting could get wrong: what comes of each form, checked in one process."""

import os
from pathlib import Path
from types import SimpleNamespace

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import pytest
import tensorflow as tf
from support.exporting import floats, host_batches, tokens

from hvdtrain.backends.objective.serving import Serving
from hvdtrain.backends.tensorflow.export import export_model
from hvdtrain.errors import TaskError


def statistics():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])


def heads():
    x = keras.Input((6,))
    return keras.Model(x, {"z": keras.layers.Dense(2)(x), "a": keras.layers.Dense(3)(x)})


def two_inputs(length=None):
    ids, mask = keras.Input((length,), dtype="int32"), keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(50, 4)(ids) * keras.ops.cast(mask, "float32")[..., None]
    return keras.Model([ids, mask], keras.layers.Dense(3)(keras.ops.sum(x, 1)))


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


def on_two(model, batch):
    return model([batch["input_ids"], batch["attention_mask"]])


def export(make_model, form, batches=None, **task):
    keras.utils.set_random_seed(1)
    path = Path(f"{make_model.__name__}{'.keras' if form == 'keras' else ''}")
    batches = host_batches(floats()) if batches is None else batches
    serving = Serving(SimpleNamespace(loss=lambda outputs, batch: 0, **task), "tf", None)
    return export_model(make_model(), serving, form, path, batches)


for make in (statistics, heads):
    assert export(make, "keras").relative < 1e-5, make
    done = export(make, "saved-model")
    assert (done.relative < 1e-5, done.batch) == (True, "any batch size"), make
    assert done.inputs == ("inputs float32 (batch, 6)",)
assert sorted(done.outputs) == ["a (batch, 3)", "z (batch, 2)"]
assert export(own, "saved-model").relative < 1e-5
with pytest.raises(TaskError, match=r"Could not locate class 'Own'(.|\n)*--to saved-model"):
    export(own, "keras")

# the call that training makes, with all its inputs, for every length and batch size
done = export(two_inputs, "saved-model", host_batches(tokens()), tf_serve=on_two)
assert done.relative < 1e-5
assert done.batch == "any batch size, any length"
assert done.inputs == ("input_ids int64 (batch, length)", "attention_mask int64 (batch, length)")
assert done.outputs == ("outputs (batch, 3)",)
loaded = tf.saved_model.load("two_inputs")
keras.utils.set_random_seed(1)
model = two_inputs()
for size, length in ((1, 1), (3, 7), (5, 40)):
    sample = tokens(size, length)
    inputs = {name: sample[name] for name in ("input_ids", "attention_mask")}
    named = {name: tf.constant(array) for name, array in inputs.items()}
    found = loaded.signatures["serving_default"](**named)
    np.testing.assert_allclose(found["outputs"], model(list(inputs.values())), atol=1e-5)
