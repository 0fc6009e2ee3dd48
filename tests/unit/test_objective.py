"""From a task's loss and metrics to one function, what is said where they do not fit, and gathered rows."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.backends.objective.gathering import find_comparing
from hvdtrain.backends.objective.logits import bad_target, check_comparable
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.backends.torch.objective import gathering
from hvdtrain.errors import ConfigError, TaskError

TABLE = {"cross_entropy": print, "accuracy": print}


def test_label_smoothing_of_another_loss_and_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ConfigError, match="label_smoothing acts on the named loss cross_entropy"):
        make_objective(SimpleNamespace(loss=print), "tf", TABLE, 0.1)
    with pytest.raises(TaskError, match="shapes differ"):
        check_comparable("mse", (4, 2, 3), (4, 3, 2))


@pytest.mark.parametrize("name", ["loss", "time"])
def test_metrics_cannot_have_the_names_of_other_numbers(name):
    with pytest.raises(TaskError, match=f"the task's metrics: '{name}' is the name of a number") as caught:
        make_objective(SimpleNamespace(loss="cross_entropy", metrics={name: "accuracy"}), "tf", TABLE)
    assert caught.value.everywhere
    own = SimpleNamespace(tf_loss=lambda model, batch: (0.0, {"mine": 1.0, name: 2.0}))
    with pytest.raises(TaskError, match=rf"^tf_loss\(\): '{name}' is the name.*\n.*'my_{name}'"):
        make_objective(own, "tf", TABLE)(None, {"targets": np.zeros(4)})


@pytest.mark.parametrize("text", ["Target -100 is out of bounds.", "Received a label value of -100 which is"])
def test_a_target_that_is_no_class_is_named_with_the_remedy(text):
    assert bad_target(IndexError(text)).remedy.endswith("ignore_index = -100.")
    assert bad_target(IndexError("index 3 is out of bounds")) is None


SAMPLES = np.random.RandomState(0).randn(6)


def mean_of(values):
    return np.asarray(values.mean()), np.asarray(float(len(values)))


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda x: (x**2, None), ""),
        (lambda x: (x - x.mean(), None), "depends on the other samples"),
        (lambda x: (x**2, x / x.max()), "depends on the other samples"),
        (lambda x: mean_of(x**2), ""),
        (lambda x: mean_of(x**2 / x.max()), "is not the mean over its samples"),
        (lambda x: (x + np.random.rand(len(x)), None), ""),
        (lambda x: ([x - x.mean()][len(x) - len(np.unique(x))], None), ""),  # it fails: nothing is known
    ],
)
@pytest.mark.parametrize("samples", [6, 5])
def test_a_loss_that_compares_samples_is_found(loss, found, samples):
    comparing = find_comparing(lambda rows, _: {"loss": loss(SAMPLES[rows])}, samples, 1e-4)
    assert found in comparing
    assert bool(found) == bool(comparing)


@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize("is_mean", [False, True])
def test_random_numbers_of_a_batch_are_not_taken_for_other_samples(samples, is_mean):
    def values_of(rows, seed, compares=False):
        noise = np.random.RandomState(seed).randn(2 * len(rows))[-len(rows) :]  # others of another size
        given = SAMPLES[rows] + (len(rows) if compares else noise)
        return {"loss": mean_of(given) if is_mean else (given, None)}

    assert find_comparing(values_of, samples, 1e-4) == ""
    assert bool(find_comparing(partial(values_of, compares=True), samples, 1e-4)) == (samples == 1)


@pytest.mark.parametrize(("kind", "travels"), [(torch.bool, torch.uint8), (torch.bfloat16, torch.int16)])
def test_types_that_horovod_lacks_travel_as_bits(monkeypatch, kind, travels):
    sent = []

    def send(rows, *_, **__):
        sent.append(rows.dtype)
        return rows.clone()

    own = SimpleNamespace(allgather_async=send, synchronize=lambda handle: handle)
    monkeypatch.setattr(gathering, "mpi_ops", own)
    alltoall = SimpleNamespace(rank=lambda: 0, alltoall=lambda rows, *_, **__: (send(rows), None))
    monkeypatch.setattr(gathering, "hvd", alltoall)
    rows = torch.tensor([[1.5, -0.0], [0.0, 3.25]]).to(kind).requires_grad_(kind.is_floating_point)
    found = gathering._Gather.apply(rows, "rows", [2])
    assert torch.equal(found, rows)
    if kind.is_floating_point:
        (found * 2).sum().backward()
        assert torch.equal(rows.grad, torch.full_like(rows, 2))
    assert set(sent) == {travels}


def test_keras_sends_bits_of_bf16_and_has_second_derivatives(monkeypatch):
    import tensorflow as tf

    from hvdtrain.backends.tensorflow.objective import gathering

    sent = []

    def send(rows, *_, **__):
        sent.append((rows.dtype, rows.shape))
        return tf.identity(rows)

    monkeypatch.setattr(gathering, "_joined", send)
    monkeypatch.setattr(gathering, "hvd", SimpleNamespace(alltoall=lambda rows, *_, **__: (send(rows), None)))
    rows = tf.cast([[1.5, -1.0], [0.0, 3.0]], tf.bfloat16)
    with tf.GradientTape() as outer:
        outer.watch(rows)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            found = tf.reduce_sum(gathering._gather(rows, "rows", tf.constant([2]), 0) ** 3)
        first = tape.gradient(found, rows)
    second = outer.gradient(first, rows)
    assert tf.reduce_all(first == 3 * rows**2)
    assert tf.reduce_all(second == 6 * rows)
    assert sent
    assert {kind for kind, _ in sent} == {tf.int16}
