"""Synchronised batch norm against the framework's plain layer on the whole batch, gradients included.

Run inside a job as the contract suite is, with HVDTRAIN_TEST_FRAMEWORK set; ``test_contract.py``
does so. Every worker runs the same tests in the same order.
"""

from functools import partial

import numpy as np
import pytest
from support import suite
from support.suite import FRAMEWORK, started_backend, state_of  # noqa: F401

from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import BatchPlan
from hvdtrain.errors import TaskError

INPUTS, CHANNELS, EPSILON, MOMENTUM = 3, 4, 1e-3, 0.25
config = partial(suite.config, momentum=0.0, sync_batch_norm=True)


class Normed:
    """A linear layer, then batch norm over channels, which stand last in inputs and outputs.

    Args:
        spatial: axes between samples and channels.
        use: what becomes of the linear layer's outputs, given the normalising layer.
        calls: how often that calls the layer.
        options: of the layer, by framework.
    """

    loss = "mse"

    def __init__(self, spatial=(), use=lambda norm, x: norm(x), calls=1, **options):
        self.spatial, self.use, self.calls = spatial, use, calls
        self.options = options.get(FRAMEWORK, {})

    def samples(self, count):
        random = np.random.RandomState(count)
        # far from 0 and of unequal spread, so that shares of the batch have unlike statistics
        inputs = random.randn(count, *self.spatial, INPUTS) * random.rand(count, *[1] * len(self.spatial), 1)
        targets = random.randn(count, *self.spatial, CHANNELS)
        return {"inputs": (inputs + 1).astype(np.float32), "targets": targets.astype(np.float32)}

    def torch_model(self):
        import torch
        from torch import nn

        task = self
        kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(self.spatial)]

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.dense = nn.Linear(INPUTS, CHANNELS)
                self.norm = kind(CHANNELS, **{"eps": EPSILON, "momentum": MOMENTUM, **task.options})

            def forward(self, x):
                return task.use(lambda y: self.norm(y.movedim(-1, 1)).movedim(1, -1), self.dense(x))

        return Model()

    def tf_model(self):
        import keras
        from keras import layers

        keras.utils.set_random_seed(1)
        inputs = keras.Input((*self.spatial, INPUTS))
        norm = layers.BatchNormalization(
            **{"epsilon": EPSILON, "momentum": 1 - MOMENTUM, "name": "norm", **self.options}
        )
        inner = keras.Input((*self.spatial, CHANNELS))
        nested = keras.Model(inner, self.use(norm, inner), name="nested")
        return keras.Model(inputs, nested(layers.Dense(CHANNELS, name="dense")(inputs)))


def part(backend, task, count, accumulate):
    """Give this worker's part of a step, and the whole micro-batches of all workers, padding left out."""
    samples = task.samples(count)
    plan = BatchPlan(count, backend.workers.size, accumulate)
    parts = [plan.part(rank, count) for rank in range(backend.workers.size)]
    places, real = parts[backend.workers.rank]
    arrays = {name: array[places] for name, array in samples.items()}
    host = HostBatch(0, arrays, real.astype(np.float32), float(count), places)
    taken = [np.concatenate([where[k][is_real[k]] for where, is_real in parts]) for k in range(accumulate)]
    whole = [{name: array[places] for name, array in samples.items()} for places in taken]
    return suite.on_device(backend, host), whole


def after_a_plain_step(backend, task, micro_batches, count):
    """Give what the plain model holds after a step of descent with rate 1; biased variances in both."""
    return (_torch_step if FRAMEWORK == "torch" else _keras_step)(backend, task, micro_batches, count)


def _torch_step(backend, task, micro_batches, count):
    import torch

    plain = task.torch_model()
    plain.load_state_dict(backend.model.state_dict())
    for batch in micro_batches:
        x, y = (torch.from_numpy(batch[name]) for name in ("inputs", "targets"))
        norm, n = plain.norm, y.numel() / CHANNELS
        before = None if norm.running_var is None else norm.running_var.clone()
        ((plain(x) - y).square().flatten(1).mean(1).sum() / count).backward()
        if before is not None:
            rate = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
            kept = before * (1 - rate) ** task.calls
            norm.running_var.copy_(kept + (norm.running_var - kept) * (n - 1) / n)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.sub_(parameter.grad)
    return {name: tensor.numpy() for name, tensor in plain.state_dict().items()}


def _keras_step(backend, task, micro_batches, count):
    import tensorflow as tf

    plain = task.tf_model()
    plain.set_weights(backend.model.get_weights())
    total = [0.0] * len(plain.trainable_variables)
    for batch in micro_batches:
        with tf.GradientTape() as tape:
            error = plain(batch["inputs"], training=True) - batch["targets"]
            loss = tf.reduce_sum(tf.reduce_mean(tf.square(error), list(range(1, len(error.shape))))) / count
        gradients = tape.gradient(loss, [v.value for v in plain.trainable_variables])
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    for variable, gradient in zip(plain.trainable_variables, total, strict=True):
        variable.assign_sub(gradient)
    return {v.path: v.numpy() for v in plain.variables}


def step(backend, batch, learning_rate):
    """Train one step; give the sum of the losses."""
    return backend.train_step(batch, learning_rate).read().sums["loss"]


def contents(backend):
    """Give what the backend's model holds, by the framework's own names."""
    if FRAMEWORK == "torch":
        return {name: tensor.numpy() for name, tensor in backend.model.state_dict().items()}
    return {v.path: v.numpy() for v in backend.model.variables}


def largest_difference(backend, task, count, accumulate=1, **fields):
    """Train one step; give how far it is from the plain model's on the whole batch."""
    backend.build(task, config(accumulate=accumulate, **fields))
    batch, whole = part(backend, task, count, accumulate)
    expected = after_a_plain_step(backend, task, whole, count)
    step(backend, batch, 1.0)
    found = contents(backend)
    assert found.keys() == expected.keys()
    everyone = backend.workers.allgather_object(found)
    if "sync_batch_norm" not in fields:
        for name, value in everyone[0].items():
            np.testing.assert_array_equal(value, everyone[-1][name], err_msg=name)
    return max(float(np.abs(found[name] - value).max()) for name, value in expected.items())


def twice(norm, x):
    return norm(norm(x) * x)


def as_rows(norm, x):
    """Normalise with each place a row of its own."""
    if FRAMEWORK == "torch":
        return norm(x.reshape(-1, CHANNELS)).reshape(x.shape)
    import keras

    return keras.ops.reshape(
        norm(keras.ops.reshape(x, (-1, CHANNELS))), (-1, *x.shape[1:])
    )  # rows' number is unknown until it is called


def masked(norm, x):
    """Normalise with a mask of steps; the outputs are without one, which the loss would apply."""
    import keras

    return norm(x, mask=keras.ops.any(x > 0, -1)) + 0.0


IMAGES = Normed((3, 4))
# task, micro-batches
CASES = {
    "vectors": (Normed(), 1),
    "images": (IMAGES, 1),
    "micro-batches": (IMAGES, 3),
    "without gamma and beta": (
        Normed((3,), torch={"affine": False}, tf={"scale": False, "center": False}),
        1,
    ),
    "called twice": (Normed((3,), twice, calls=2), 1),
    "places as rows": (Normed((5,), as_rows), 1),
}
CASES |= {
    "torch": {
        "statistics of all steps": (Normed((3,), torch={"momentum": None}), 3),
        "without moving statistics": (Normed(torch={"track_running_stats": False}), 1),
    },
    "tf": {
        "channels first": (Normed((CHANNELS, 3), tf={"axis": 1}), 1),
        "masked": (Normed((5,), masked), 1),
    },
}[FRAMEWORK]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_plain_layers_on_the_whole_batch(started, case):
    task, accumulate = CASES[case]
    assert largest_difference(started, task, 11, accumulate) < 1e-5


def test_a_micro_batch_of_padding_alone_moves_nothing(started):
    task = IMAGES
    started.build(task, config())
    before = contents(started)
    arrays = {name: array[None, :2] for name, array in task.samples(2).items()}
    host = HostBatch(0, arrays, np.zeros((1, 2), np.float32), 1.0, np.zeros((1, 2), int))
    step(started, suite.on_device(started, host), 1.0)
    for name, value in contents(started).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_variances_keep_their_digits_far_from_zero(started):
    """In fp32 the difference of E[x^2] and E[x]^2 would have no right digit here."""
    task = IMAGES
    started.build(task, config())
    state = state_of(started)
    (variance,) = (name for name in state if name.endswith("moving_variance"))
    state["model/dense/bias"] = np.full(CHANNELS, 3000, np.float32)
    started._state.load(state)
    batch, whole = part(started, task, 11, 1)
    x = whole[0]["inputs"].astype(np.float64) @ state["model/dense/kernel"] + 3000
    step(started, batch, 0.0)
    found = (state_of(started)[variance] - (1 - MOMENTUM)) / MOMENTUM
    np.testing.assert_allclose(found, x.reshape(-1, CHANNELS).var(0), rtol=1e-3)


class OwnWay(Normed):
    """With a layer that adds 1 to what the plain one gives."""

    def __init__(self, marked):
        super().__init__()
        self.marked = marked

    def torch_model(self):
        import torch

        class Mine(torch.nn.BatchNorm1d):
            synchronises = self.marked

            def forward(self, x):
                return super().forward(x) + 1

        return torch.nn.Sequential(torch.nn.Linear(INPUTS, CHANNELS), Mine(CHANNELS))

    def tf_model(self):
        import keras

        class Mine(keras.layers.BatchNormalization):
            synchronises = self.marked

            def call(self, inputs, training=None, mask=None):
                return super().call(inputs, training, mask) + 1

        return keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(CHANNELS), Mine(name="1")])


def test_a_layer_that_computes_in_its_own_way_is_refused_by_name(started):
    with pytest.raises(TaskError, match="--sync-batch-norm cannot synchronise 1: Mine"):
        started.build(OwnWay(marked=False), config())


@pytest.mark.parametrize("synchronised", [True, False])
def test_a_layer_that_may_be_replaced_is_in_training_alone(started, synchronised):
    task = OwnWay(marked=True)
    started.build(task, config(sync_batch_norm=synchronised))
    batch, whole = part(started, task, 11, 1)
    if synchronised:  # layers wait for other workers, which is no time of this worker's own
        assert started.parts.clock.timed == 0
    added = 0 if synchronised else 1
    loss = step(started, batch, 0.0) / 11
    if synchronised or started.workers.size == 1:
        # normalised outputs and targets of mean 0: all that is left to find is what was added
        targets = whole[0]["targets"]
        x = whole[0]["inputs"] @ state_of(started)[next(n for n in state_of(started) if n.endswith("kernel"))]
        normalised = (x - x.mean(0)) / x.std(0)
        assert loss == pytest.approx(float(np.square(normalised + added - targets).mean()), rel=1e-2)


def test_the_exported_model_is_a_plain_one(started, tmp_path):
    task = IMAGES
    started.build(task, config())
    batch, _ = part(started, task, 11, 1)
    step(started, batch, 0.1)
    arrays = {name: array[None] for name, array in task.samples(4).items()}
    host = HostBatch(0, arrays, np.ones((1, 4), np.float32), 4.0, np.zeros((1, 4), int))
    form, name = ("torch-export", "model.pt2") if FRAMEWORK == "torch" else ("keras", "model.keras")
    exported = started.export(form, tmp_path / name, [host])
    assert exported.difference < 1e-5
