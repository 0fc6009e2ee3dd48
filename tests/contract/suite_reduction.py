"""How gradients are reduced: what every reducer must do.

Run inside a job as ``suite_backend.py`` is; ``test_contract.py`` does so.
"""

from importlib import import_module

import numpy as np
import pytest
from support import suite
from support.suite import FOLDER, FRAMEWORK, assert_equal, config, only_torch, started_backend, state_of  # noqa: F401

from hvdtrain.backends.reduction import choose_reducer, reducer_class
from hvdtrain.errors import TaskError

SAMPLES, INPUTS, OUTPUTS = 24, 5, 3
RANDOM = np.random.RandomState(7)
X = RANDOM.randn(SAMPLES, INPUTS).astype(np.float32)
Y = RANDOM.randn(SAMPLES, OUTPUTS).astype(np.float32)


@pytest.fixture
def reduction(started):
    """The framework's module of all-reduces."""
    return import_module(f"hvdtrain.backends.{FOLDER}.reduction.all_reduce")


class Deep:
    """Three layers; of each worker's own samples."""

    loss = "mse"

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))

    def tf_model(self):
        from keras import Input, Sequential, layers

        return Sequential(
            [Input((INPUTS,)), layers.Dense(8, "tanh", name="0"), layers.Dense(OUTPUTS, name="2")]
        )


def build(backend, **fields):
    """Build with initial values that are equal on all workers; compression may be any row of the table."""
    compression = fields.pop("compression", "none")
    settings = config(**fields).model_copy(update={"compression": compression})
    info = backend.build(Deep(), settings)
    backend._state.load_initial(0)
    return info


def batch(backend, step, accumulate=1):
    host = suite.host_batch(backend, {"inputs": X, "targets": Y}, SAMPLES, accumulate=accumulate, step=step)
    return suite.on_device(backend, host)


@pytest.fixture
def sent(reduction, monkeypatch):
    """The types of all that is summed."""
    types, name = [], {"torch": "allreduce_async_", "tf": "allreduce"}[FRAMEWORK]
    begin = getattr(reduction.hvd, name)

    def begun(tensor, **arguments):
        types.append(str(tensor.dtype))
        return begin(tensor, **arguments)

    monkeypatch.setattr(reduction.hvd, name, begun)
    return types


def test_small_parts_of_the_mean_keep_their_digits_in_fp16(started, sent):
    """A worker's part of 1.5e-5 lies among the numbers of fp16 that have few digits; times 2 it has more."""
    size = started.workers.size
    if size == 1:
        return
    reducer = reducer_class(FRAMEWORK, "fp16")(started.workers)
    assert reduced(reducer, 1.2345e-4 / size) == pytest.approx(1.2345e-4, rel=2**-10)
    assert len(sent) == 1
    assert "float16" in sent[0]


def test_gradients_with_a_loss_scale_are_not_multiplied_again(started):
    """The loss scale has multiplied them by the number of workers; a second time, they would overflow."""
    size = started.workers.size
    if size == 1:
        return
    settings = config(precision="fp16", compression="fp16")
    assert reduced(choose_reducer(settings, started.workers), 40_000 / size) == 40_000
    assert reduced(reducer_class(FRAMEWORK, "fp16")(started.workers), 40_000 / size) == np.inf


def reduced(reducer, part):
    """Return the sum of one number of each worker."""
    if FRAMEWORK == "torch":
        import torch

        reducer.attach({"weight": torch.nn.Parameter(torch.zeros(1))})
        (found,), _ = reducer.finish([torch.full((1,), part)])
        return float(found)
    import tensorflow as tf

    reducer.attach({"weight": None})
    return float(tf.function(lambda: reducer.finish([tf.fill((1,), np.float32(part))])[0])()[0][0])


# numbers in the middle of two of bf16 for two workers; so is the sum of what they are rounded to
TIES = np.array([[1 + 2**-8, 1 + 2**-8], [2**-8 * (1 + 2**-8), 1]], np.float32)


def test_sums_of_bf16_are_as_near_as_documented(started):
    size, rank = started.workers.size, started.workers.rank
    parts = np.random.RandomState(5).randn(size, 7, 3).astype(np.float32)
    parts[:, 0, :2] = 0
    parts[:2, 0, :2] = TIES[:size]
    parts *= np.float32(2.0**-100)
    reducer = reducer_class(FRAMEWORK, "bf16")(started.workers)
    if FRAMEWORK == "torch":
        import torch

        reducer.attach({"weight": torch.zeros(7, 3), "count": torch.zeros(2)})
        given = [torch.from_numpy(parts[rank]), torch.ones(2, dtype=torch.float64)]
        found, count = (tensor.numpy() for tensor in reducer.finish(given)[0])
    else:
        import tensorflow as tf

        reducer.attach(
            {"weight": tf.Variable(tf.zeros((7, 3))), "count": tf.Variable(tf.zeros(2, tf.float64))}
        )
        function = tf.function(lambda one, two: reducer.finish([one, two])[0], autograph=False)
        found, count = (t.numpy() for t in function(tf.constant(parts[rank]), tf.ones(2, tf.float64)))
    parts = parts.astype(np.float64)
    bound = ((1 + 2.0**-8) ** size - 1) * np.abs(parts).sum(0)
    error = np.abs(found - parts.sum(0))
    assert (error <= (bound if size > 1 else 0)).all()
    assert error[0, 0] > bound[0, 0] / 2 or size != 2
    assert count.tolist() == 2 * [size]
    assert len({bytes(one) for one in started.workers.allgather_object(found.tobytes())}) == 1


GIVEN = [np.ones((20,), np.float32), np.full((2, 3), 2, np.float32), np.full((3,), 3, np.float64)]


def summed_with(reducer, vectors):
    """Return the sums of GIVEN on each worker with each of the vectors, one step after the other."""
    if FRAMEWORK == "tf":
        import tensorflow as tf

        given = [tf.Variable(array) for array in GIVEN]
        reducer.attach({str(place): variable for place, variable in enumerate(given)})
        function = tf.function(lambda v: reducer.finish([one.read_value() for one in given], v))
        return [function(tf.constant(vector)) for vector in vectors]
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(a.shape, dtype=torch.from_numpy(a).dtype)) for a in GIVEN]
    reducer.attach({str(place): parameter for place, parameter in enumerate(parameters)})
    found = []
    for vector in vectors:
        for parameter in parameters:
            parameter.grad = None
        reducer.follow()
        sums, total = reducer.finish([torch.from_numpy(a.copy()) for a in GIVEN], torch.tensor(vector))
        found.append(([one.clone() for one in sums], total))
    return found


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_a_vector_is_summed_with_the_gradients(started, compression):
    """It is summed in fp32, with gradients of any type; a task may return more metrics in a later step."""
    size, rank = started.workers.size, started.workers.rank
    vectors = [[70_001.0, 1.0 + rank], [1e-6, 2.0, 3.0], [5.0]]
    expected = [[70_001.0 * size, size * (size + 1) / 2], [1e-6 * size, 2 * size, 3 * size], [5 * size]]
    found = summed_with(reducer_class(FRAMEWORK, compression)(started.workers), vectors)
    for (sums, total), wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(total, wanted, rtol=1e-6)
        for one, given in zip(sums, GIVEN, strict=True):
            np.testing.assert_array_equal(one, size * given)


@only_torch
def test_a_backward_pass_too_many_is_refused_once_its_sum_has_begun(started, reduction):
    import torch

    if started.workers.size == 1:
        return
    reducer = reduction.AllReduce(started.workers)
    reducer.overlaps = True
    weight = torch.nn.Parameter(torch.ones(2))
    reducer.attach({"weight": weight})
    reducer.finish([torch.zeros(2)])
    reducer.follow()
    weight.sum().backward()
    with pytest.raises(TaskError, match="the gradient of weight grew after its last backward pass"):
        weight.sum().backward()
    reducer.finish([weight.grad])


@only_torch
@pytest.mark.parametrize("keep", ["the gradient", "an alias"])
def test_a_gradient_that_somebody_keeps_does_not_change(started, reduction, keep):
    import torch

    size = started.workers.size
    if size == 1:
        return
    reducer = reduction.AllReduce(started.workers)
    weight = torch.nn.Parameter(torch.ones(2))
    reducer.attach({"weight": weight})
    kept = []
    for factor in range(1, 5):
        weight.grad = None
        reducer.follow()
        (factor * weight).sum().backward()
        (weight.grad,), _ = reducer.finish([weight.grad])
        kept.append(weight.grad if keep == "the gradient" else weight.grad.detach())
    assert [one.tolist() for one in kept] == [2 * [factor * size] for factor in range(1, 5)]


@only_torch
def test_memory_is_used_again(started, reduction):
    import torch

    if started.workers.size == 1:
        return
    reducer = reduction.AllReduce(started.workers)
    weight = torch.nn.Parameter(torch.ones(2))
    reducer.attach({"weight": weight})
    places = set()
    for _ in range(8):
        weight.grad = None
        reducer.follow()
        weight.sum().backward()
        (weight.grad,), _ = reducer.finish([weight.grad])
        places.add(weight.grad.data_ptr())
    assert len(places) <= 2  # Horovod's thread may hold the one before a little longer


EARLY = [("bf16", 2), ("none", 2), ("fp16", 1)]


@pytest.mark.parametrize(("compression", "accumulate"), EARLY if FRAMEWORK == "torch" else EARLY[:1])
def test_sums_that_are_sent_early_are_the_same(started, monkeypatch, accumulate, compression):
    """Sums of two numbers do not depend on where these stand; others are equal when a job is repeated."""
    monkeypatch.setattr("hvdtrain.backends.reduction.shards.LEAST_BYTES", 64)

    def trained(overlap):
        info = build(started, overlap=overlap, compression=compression, accumulate=accumulate, momentum=0.9)
        is_early = overlap == "true" and started.workers.size > 1
        assert ("parts during the backward pass" in info.reduction) == is_early
        for step in range(4):
            started.train_step(batch(started, step, accumulate), 0.1).read()
        return {name: np.array(value) for name, value in state_of(started).items()}

    early, again, late = trained("true"), trained("true"), trained("false")
    tolerance = 1e-6 if started.workers.size > 2 else 0
    for name, value in early.items():
        np.testing.assert_array_equal(value, again[name])
        np.testing.assert_allclose(value, late[name], rtol=tolerance, atol=tolerance)
