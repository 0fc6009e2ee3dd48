"""Keras layers that load their state themselves: what rank 0 of the first job has is the checkpoint's."""

import json
from pathlib import Path

import numpy as np
from conformance.zoo import Model, X, Y


def is_first():
    """Return whether this is rank 0 of the job that begins the run, or the plain loop."""
    import horovod.tensorflow as hvd

    return not Path("run/metrics.jsonl").exists() and not (hvd.is_initialized() and hvd.rank())


class OfLayer(Model):
    """A model whose first layer has statistics or a vocabulary, which other workers and later jobs do not."""

    def data(self, rows):
        return self.inputs(X[rows]), Y[rows]

    def inputs(self, x):
        return x

    def layers(self, keras):
        raise NotImplementedError

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((4,)), *self.layers(keras), keras.layers.Dense(3)])

    @classmethod
    def frameworks(cls):
        return () if cls is OfLayer else ("tf",)


class Normalized(OfLayer):
    """Statistics of the data."""

    def layers(self, keras):
        layer = keras.layers.Normalization()
        layer.build((None, 4))
        if is_first():
            layer.adapt(X * 3 + 1)
        return [layer]


class Bins(OfLayer):
    """Boundaries of bins, which are no variables."""

    def layers(self, keras):
        layer = keras.layers.Discretization(num_bins=4)
        layer.adapt(X if is_first() else 10 * X + 5)
        return [layer, keras.layers.Embedding(4, 2), keras.layers.Flatten()]


class OfIntegers(OfLayer):
    """A vocabulary of integers."""

    def inputs(self, x):
        return np.round(2 * x).astype(np.int64)

    def layers(self, keras):
        layer = keras.layers.IntegerLookup(max_tokens=12)
        layer.adapt(self.inputs(X if is_first() else 5 * X[:3]))
        return [layer, keras.layers.Embedding(12, 2), keras.layers.Flatten()]


class OfStrings(OfIntegers):
    """A vocabulary of strings, in a layer below a layer."""

    def layers(self, keras):
        import tensorflow as tf

        class Words(keras.layers.Layer):
            def __init__(self, data):
                super().__init__()
                self.words = keras.layers.TextVectorization(12, output_sequence_length=4, standardize=None)
                self.words.adapt(self.text(data))

            def text(self, x):
                return tf.strings.reduce_join(tf.strings.as_string(x), 1, separator=" ")

            def call(self, x):
                return self.words(self.text(tf.cast(x, tf.int64)))

            def compute_output_shape(self, shape):
                return shape

        words = Words(self.inputs(X if is_first() else 5 * X[:3]))
        return [words, keras.layers.Embedding(12, 2), keras.layers.Flatten()]


class OwnStore(OfLayer):
    """A number that only the layer's own methods save and load."""

    def layers(self, keras):
        class Scaled(keras.layers.Layer):
            factor = 0.5 if is_first() else 2.0

            def build(self, shape):
                self.shift = self.add_weight(shape=shape[1:], initializer="ones")

            def call(self, x):
                return x * self.factor + self.shift

            def save_own_variables(self, store):
                store["shift"], store["factor"] = self.shift, self.factor

            def load_own_variables(self, store):
                self.shift.assign(store["shift"])
                self.factor = float(store["factor"][()])

        return [Scaled()]


class OwnFile(OfLayer):
    """A file that only the layer's own methods write and read."""

    def layers(self, keras):
        class Scaled(keras.layers.Layer):
            factors = [0.5, 1, 2, 4] if is_first() else [9, 9, 9, 9]

            def call(self, x):
                return x * np.array(self.factors, np.float32)

            def save_assets(self, folder):
                Path(folder, "factors.json").write_text(json.dumps(self.factors))

            def load_assets(self, folder):
                self.factors = json.loads(Path(folder, "factors.json").read_text())

        return [Scaled()]


class Finalized(OfLayer):
    """Tensors that a layer computes of its variables once."""

    def layers(self, keras):
        class Scaled(keras.layers.Layer):
            def build(self, shape):
                self.squares = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)
                self.squares.assign(np.full(4, 4.0 if is_first() else 81.0))
                self.finalize_state()

            def finalize_state(self):
                self.factors = keras.ops.sqrt(self.squares)

            def call(self, x):
                return x / self.factors

        return [Scaled()]
