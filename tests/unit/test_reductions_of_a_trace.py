"""The reductions of TensorFlow's steps, as traced by one of two workers; the other one does the same."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from support.fakes import FakeWorkers, one_worker

from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch

SAMPLES, INPUTS, OUTPUTS = 8, 3, 2
X = np.random.RandomState(1).randn(SAMPLES, INPUTS).astype(np.float32)
Y = np.random.RandomState(2).randn(SAMPLES, OUTPUTS).astype(np.float32)


class Dense:
    loss = "mse"

    def tf_model(self):
        inputs = keras.Input((INPUTS,))
        return keras.Model(inputs, keras.layers.Dense(OUTPUTS)(keras.layers.Dense(4)(inputs)))


class OwnStep(Dense):
    """Its first call reaches the first layer alone."""

    def tf_optimizers(self, model):
        return {"all": (keras.optimizers.SGD(0.1), model.trainable_variables)}

    def tf_step(self, model, batch, optimizers):
        with tf.GradientTape() as tape:
            first = tf.reduce_mean(model.layers[1](batch["inputs"]) ** 2, -1)
        optimizers["all"].minimize(first, tape)
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((model(batch["inputs"]) - batch["targets"]) ** 2, -1)
        optimizers["all"].minimize(losses, tape)
        return losses, {}


@pytest.fixture
def begun(monkeypatch):
    """Names and types of what is reduced, in the order of the trace."""
    found = []

    def allreduce(tensor, *, name, op=None, postscale_factor=1.0):
        del op
        found.append((name, tensor.dtype.name))
        return tensor * tf.cast(2 * postscale_factor, tensor.dtype)

    monkeypatch.setattr(hvd, "allreduce", allreduce)
    return found


def two_workers():
    return FakeWorkers(0, ["here", "here"], None, [b""] * 2)


def losses_of(workers, task, accumulate=1, **fields):
    """Return the losses of three steps in which each worker has all samples."""
    backend = TensorFlowBackend(workers, "CPU")
    backend.build(task, Config(framework="tf", device="cpu", threads=1, **fields))
    for field in backend._state.model.fields:
        field.variable.assign(np.full(field.variable.shape, 0.1, np.float32))
    indices = np.arange(SAMPLES).reshape(accumulate, -1)
    arrays = {"inputs": X[indices], "targets": Y[indices]}
    weights = np.ones(indices.shape, np.float32)
    found = []
    for step in range(3):
        host = HostBatch(step, arrays, weights, float(SAMPLES * workers.size), indices)
        (batch,) = backend.to_device([host])
        found.append(backend.train_step(batch, 0.1).read().sums["loss"] / workers.size)
    return found


def test_a_step_has_one_reduction_and_numbers_do_not_travel_as_fp16(begun):
    found = losses_of(two_workers(), Dense(), accumulate=2)
    assert begun == [("hvdtrain.gradients.0", "float32")]
    assert found == pytest.approx(losses_of(one_worker(), Dense(), accumulate=2), rel=1e-6)
    losses_of(two_workers(), Dense(), compression="fp16")
    assert begun[1:] == [("hvdtrain.metrics", "float32"), ("hvdtrain.gradients.0", "float16")]


def test_calls_of_an_own_step_reduce_all_that_they_may_reach(begun):
    found = losses_of(two_workers(), OwnStep())
    gradients = [one for one in begun if one[0].startswith("hvdtrain.gradient")]
    assert gradients == 2 * [("hvdtrain.gradients.0", "float32")]
    assert found == pytest.approx(losses_of(one_worker(), OwnStep()), rel=1e-6)
