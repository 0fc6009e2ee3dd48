"""What Keras models add to the loss, at one worker. Run in a pool; ``test_added_losses.py`` does so."""

import numpy as np
import pytest

from hvdtrain.backends import load_backend
from hvdtrain.backends.portable.initial_values import with_initial_values
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

SAMPLES, INPUTS = 12, 4
RANDOM = np.random.RandomState(5)
ARRAYS = {
    "inputs": RANDOM.randn(SAMPLES, INPUTS).astype(np.float32),
    "targets": RANDOM.randn(SAMPLES, INPUTS).astype(np.float32),
}
DECAY, ACTIVITY = 0.3, 0.1


@pytest.fixture(scope="module")
def started():
    return load_backend(Config(framework="tf", device="cpu", threads=1))


def block(name):
    import keras

    class Block(keras.layers.Layer):
        """Adds a loss of its activations, has an activity regularizer, and so has a layer in it."""

        recompute = True

        def __init__(self, name):
            penalty = keras.regularizers.L2(ACTIVITY)
            super().__init__(name=name, activity_regularizer=penalty)
            self.dense = keras.layers.Dense(INPUTS, activity_regularizer=penalty)

        def build(self, shape):
            self.dense.build(shape)
            super().build(shape)

        def call(self, x):
            y = self.dense(x)
            self.add_loss(keras.ops.mean(y**2))
            return x + keras.ops.tanh(y)

    return Block(name)


class Regularized:
    """A regularizer of the weights alone: what it adds is known in closed form."""

    loss = "mse"
    metrics = {}  # noqa: RUF012

    def tf_model(self):
        import keras

        x = keras.Input((INPUTS,))
        penalty = keras.regularizers.L2(DECAY)
        return keras.Model(x, keras.layers.Dense(INPUTS, name="dense", kernel_regularizer=penalty)(x))


class Plain(Regularized):
    def tf_model(self):
        import keras

        x = keras.Input((INPUTS,))
        return keras.Model(x, keras.layers.Dense(INPUTS, name="dense")(x))


class Activities(Regularized):
    """Two blocks, of which the first is called twice."""

    def tf_model(self):
        import keras

        x = keras.Input((INPUTS,))
        first = block("first")
        return keras.Model(x, first(block("second")(first(x))))


class TwoCalls(Activities):
    """An objective of its own that calls the model twice."""

    def tf_loss(self, model, batch):
        import tensorflow as tf

        outputs = model(batch["inputs"]), model(2 * batch["inputs"])
        return tf.add_n([tf.reduce_mean((y - batch["targets"]) ** 2, -1) for y in outputs]), {}


class TwoCallsByHand(TwoCalls):
    """The same, with what the model adds added by hand."""

    def tf_loss(self, model, batch):
        import tensorflow as tf

        losses = 0.0
        for factor in (1, 2):
            losses += tf.reduce_mean((model(factor * batch["inputs"]) - batch["targets"]) ** 2, -1)
            losses += tf.add_n(model.losses)
        return losses, {}


class Taken(Regularized):
    metrics = {"regularization_loss": "mae"}  # noqa: RUF012


def build(backend, task, **fields):
    info = backend.build(task, Config(framework="tf", device="cpu", threads=1, momentum=0.0, **fields))
    backend._state.load(with_initial_values(backend._state.snapshot().read(), 0))
    return info


def batch(backend, step=0, accumulate=1):
    arrays = {name: a.reshape(accumulate, -1, INPUTS) for name, a in ARRAYS.items()}
    weights = np.ones((accumulate, SAMPLES // accumulate), np.float32)
    return next(
        iter(backend.to_device([HostBatch(step, arrays, weights, float(SAMPLES), np.arange(SAMPLES))]))
    )


def means(metrics):
    return {name: value / metrics.weight for name, value in metrics.sums.items()}


def curve(backend, task, steps=2, **fields):
    """Train; give the means of each step, and of an evaluation after it."""
    build(backend, task, **fields)
    accumulate = fields.get("accumulate", 1)
    found = []
    for i in range(steps):
        found.append(means(backend.train_step(batch(backend, i, accumulate), 0.02).read()))
        found.append(means(backend.eval_metrics(backend.eval_step(batch(backend, i))).read()))
    return found


@pytest.fixture(scope="module")
def expected(started):
    return curve(started, Activities())


@pytest.mark.parametrize("fields", [{"checkpoint_activations": True}, {"compile": True}, {"accumulate": 2}])
def test_other_ways_to_compute_have_the_same_curve(started, expected, fields):
    for found, plain in zip(curve(started, Activities(), **fields), expected, strict=True):
        assert found == pytest.approx(plain, rel=1e-5)
        assert found["regularization_loss"] > 0.1


def test_two_calls_add_their_losses_and_an_objective_that_reads_them_adds_them_itself(started):
    whole, by_hand = curve(started, TwoCalls()), curve(started, TwoCallsByHand())
    assert [found["loss"] for found in by_hand] == pytest.approx([found["loss"] for found in whole], rel=1e-5)
    assert "regularization_loss" not in by_hand[0]


def test_a_metric_of_that_name_is_refused(started):
    with pytest.raises(TaskError, match="the task has a metric 'regularization_loss'"):
        curve(started, Taken())


class Compiled(Regularized):
    def tf_model(self):
        model = super().tf_model()
        model.compile("adam", "mse")
        return model


class OwnStep(Regularized):
    def tf_model(self):
        import keras

        class Model(keras.Model):
            def train_step(self, data):
                return {}

        x = keras.Input((INPUTS,))
        return Model(x, keras.layers.Dense(INPUTS)(x))


@pytest.mark.parametrize(
    ("task", "notes"),
    [
        (Regularized, []),
        (Compiled, ["the settings of the model's compile() (optimizer, loss, metrics) are not used"]),
        (OwnStep, ["train_step of the model (of model.fit) are not called"]),
    ],
)
def test_what_is_for_fit_alone_is_noted(started, task, notes):
    assert [note.partition(":")[0] for note in build(started, task()).notes] == notes
