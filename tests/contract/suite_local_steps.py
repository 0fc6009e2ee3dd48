"""Local steps: what workers compute alone, and what makes them equal, against formulas in numpy.

Run inside a job as ``suite_backend.py`` is; ``test_contract.py`` does so.
"""

from functools import partial

import numpy as np
import pytest
from support import suite
from support.suite import FRAMEWORK, assert_equal, started_backend, state_of  # noqa: F401

from hvdtrain.backends.step_metrics import ControlFlags, StepStatistics, encode_signals
from hvdtrain.data.order import BatchPlan

SAMPLES, INPUTS, OUTPUTS, STEPS = 12, 5, 3, 6
RANDOM = np.random.RandomState(11)
X = RANDOM.randn(STEPS, SAMPLES, INPUTS).astype(np.float32)
Y = RANDOM.randn(STEPS, SAMPLES, OUTPUTS).astype(np.float32)
KERNEL, RATE = "model/0/kernel", 0.1


class Linear:
    """A matrix, whose gradient is easily written down."""

    loss = "mse"

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))

    def tf_model(self):
        from keras import Input, Sequential, layers

        return Sequential([Input((INPUTS,)), layers.Dense(OUTPUTS, use_bias=False, name="0")])


class Huge(Linear):
    """A loss that overflows in fp16 for the workers whose samples are marked."""

    @staticmethod
    def loss(outputs, batch):
        return (outputs.sum(1) if hasattr(outputs, "sum") else _row_sums(outputs)) * batch["scale"]


def _row_sums(outputs):
    import keras

    return keras.ops.sum(outputs, 1)


config = partial(suite.config, momentum=0.0)


def build(backend, task=None, **fields):
    return suite.build(backend, task or Linear(), **{"momentum": 0.0, **fields})


def batch(backend, step, accumulate=1, samples=SAMPLES, **more):
    arrays = {"inputs": X[step], "targets": Y[step]}
    arrays |= {name: np.full(SAMPLES, value, np.float32) for name, value in more.items()}
    host = suite.host_batch(backend, arrays, samples, accumulate=accumulate, size=SAMPLES, step=step)
    return suite.on_device(backend, host)


def train(backend, steps, every, accumulate=1):
    """Train, and give the losses of all workers in each window."""
    losses = []
    for step in range(steps):
        backend.train_step(batch(backend, step, accumulate), RATE)
        if (step + 1) % every == 0:
            losses.append(backend.synchronize().read().mean("loss"))
    return losses


def expected(workers, kernel, steps, every, *, momentum=0.0, outer=None):
    """Give kernel, its mean momentum and the outer momentum as the formulas have them."""
    start, velocity, mean_slot = kernel.astype(np.float64), np.zeros_like(kernel, np.float64), 0.0
    own = [start.copy() for _ in range(workers)]
    slots = [np.zeros_like(start) for _ in range(workers)]
    for step in range(steps):
        for rank in range(workers):
            places, _ = BatchPlan(SAMPLES, workers, 1).part(rank, SAMPLES)
            x, y = X[step][places[0]], Y[step][places[0]]
            gradient = 2 * x.T @ (x @ own[rank] - y) / (len(x) * OUTPUTS)
            slots[rank] = momentum * slots[rank] + gradient
            own[rank] = own[rank] - RATE * slots[rank]
        if (step + 1) % every == 0:
            mean, mean_slot = np.mean(own, 0), np.mean(slots, 0)
            if outer is not None:
                rate, outer_momentum = outer
                gradient = start - mean
                velocity = outer_momentum * velocity + gradient
                mean = start - rate * (gradient + outer_momentum * velocity)
            start = mean
            own, slots = [mean.copy() for _ in own], [mean_slot.copy() for _ in slots]
    return start, mean_slot, velocity


def test_one_step_and_its_average_are_an_ordinary_step(started):
    build(started, clip_norm=None, accumulate=2)
    for step in range(STEPS):
        started.train_step(batch(started, step, 2), RATE).read()
    ordinary = state_of(started)
    build(started, sync_every=1, accumulate=2)
    train(started, STEPS, 1, accumulate=2)
    np.testing.assert_allclose(state_of(started)[KERNEL], ordinary[KERNEL], atol=1e-6)


@pytest.mark.parametrize("outer", [None, (0.7, 0.9)])
def test_local_steps_are_the_formulas(started, outer):
    fields = {"outer_optimizer": "nesterov"} if outer else {}
    if outer:
        fields |= {"outer_learning_rate": outer[0], "outer_momentum": outer[1]}
    build(started, sync_every=3, momentum=0.8, **fields)
    kernel = state_of(started)[KERNEL]
    train(started, STEPS, 3)
    found = state_of(started)
    result, slot, velocity = expected(started.workers.size, kernel, STEPS, 3, momentum=0.8, outer=outer)
    np.testing.assert_allclose(found[KERNEL], result, atol=1e-6)
    np.testing.assert_allclose(found["optimizer/momentum/0/kernel"], slot, atol=1e-6)
    if outer:
        np.testing.assert_allclose(found["optimizer/outer_momentum/0/kernel"], velocity, atol=1e-6)
    else:
        assert not any("outer" in name for name in found)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_workers_differ_between_synchronisations_and_are_equal_after_one(started, optimizer):
    build(started, sync_every=2, momentum=0.9 if optimizer in ("sgd", "lars") else 0.0, optimizer=optimizer)

    def distinct(names):
        state = {name: array.tobytes() for name, array in state_of(started).items() if names in name}
        return len({str(sorted(one.items())) for one in started.workers.allgather_object(state)})

    started.train_step(batch(started, 0), RATE)
    size = started.workers.size
    assert (distinct("model/"), distinct("optimizer/")) == (size, size)
    started.train_step(batch(started, 1), RATE)
    started.synchronize()
    assert (distinct("model/"), distinct("optimizer/")) == (1, 1)


def test_metrics_and_signals_are_sums_over_all_steps_and_workers(started):
    build(started, sync_every=3)
    last = started.workers.rank == started.workers.size - 1
    own = []
    for step in range(3):
        flags = ControlFlags(stop=last and step == 1)
        signals = encode_signals(flags, StepStatistics(skipped_samples=step))
        own.append(started.train_step(batch(started, step), RATE, signals).read())
    metrics = started.synchronize().read()
    gathered = started.workers.allgather_object([(m.sums["loss"], m.weight) for m in own])
    assert metrics.sums["loss"] == pytest.approx(sum(loss for one in gathered for loss, _ in one), rel=1e-6)
    assert metrics.weight == sum(weight for one in gathered for _, weight in one) == 3 * SAMPLES
    assert metrics.flags == ControlFlags(stop=True)
    assert metrics.statistics.skipped_samples == 3 * started.workers.size
    assert not started.train_step(batch(started, 3), RATE).read().flags


@pytest.mark.parametrize("optimizer", ["adamw"])
def test_a_worker_without_samples_stays_where_it_is(started, optimizer):
    size = started.workers.size
    build(started, sync_every=1, momentum=0.9, weight_decay=0.1, optimizer=optimizer)
    before = state_of(started)
    started.train_step(batch(started, 0, samples=1), RATE)
    alone = state_of(started)
    has_one = BatchPlan(SAMPLES, size).part(started.workers.rank, 1)[1].any()
    moved = {name for name in before if not np.array_equal(before[name], alone[name])}
    assert bool(moved) == has_one
    kernels = started.workers.allgather_object(alone[KERNEL])
    metrics = started.synchronize().read()
    np.testing.assert_allclose(state_of(started)[KERNEL], np.mean(kernels, 0), atol=1e-6)
    assert metrics.weight == 1
    assert np.isfinite(metrics.mean("loss"))
    if optimizer == "adamw":
        assert steps_of_all(started) == [1] * size


def steps_of_all(backend):
    """Give the steps that each worker's optimizer counts."""
    return backend.workers.allgather_object(int(state_of(backend)["optimizer/step"]))


def test_the_moving_average_takes_the_weights_of_the_synchronisations(started):
    build(started, sync_every=3, ema_decay=0.5)
    before = state_of(started)
    train(started, 3, 3)
    after = state_of(started)
    kept = np.prod([min(0.5, (1 + step) / (10 + step)) for step in (1, 2, 3)])
    average = kept * before["ema/0/kernel"] + (1 - kept) * after[KERNEL]
    np.testing.assert_allclose(after["ema/0/kernel"], average, atol=1e-6)


def test_gradients_are_clipped_on_each_worker(started):
    build(started, sync_every=1, clip_norm=1e-3)
    before = state_of(started)[KERNEL]
    started.train_step(batch(started, 0), RATE)
    assert np.linalg.norm(state_of(started)[KERNEL] - before) == pytest.approx(RATE * 1e-3, rel=1e-3)
    assert "gradient_norm" not in started.synchronize().read().sums  # each worker has another


def test_a_state_goes_on_as_if_it_had_not_been_saved(started):
    fields = {"sync_every": 2, "outer_optimizer": "nesterov", "momentum": 0.9}
    build(started, **fields)
    train(started, 4, 2)
    saved = state_of(started)
    train(started, 2, 2)
    expected_state = state_of(started)
    build(started, **fields)
    started.scatter_state(saved if started.workers.rank == 0 else None)
    train(started, 2, 2)
    assert_equal(state_of(started), expected_state)


def test_a_state_without_an_outer_momentum_starts_it_from_zero(started):
    fields = {"sync_every": 2, "outer_optimizer": "nesterov"}
    build(started, **fields)
    train(started, 2, 2)
    saved = {name: array for name, array in state_of(started).items() if "outer" not in name}
    started.scatter_state(saved if started.workers.rank == 0 else None)
    assert not state_of(started)["optimizer/outer_momentum/0/kernel"].any()


def test_workers_that_skip_steps_of_fp16_go_on_with_one_scale(started):
    """The last worker's gradients overflow; the others' do not."""
    build(started, Huge(), sync_every=2, precision="fp16", optimizer="adamw")
    last = started.workers.rank == started.workers.size - 1
    for step in range(2):
        started.train_step(batch(started, step, scale=1e4 if last and step == 0 else 1e-3), RATE).read()
    started.synchronize().read()
    update = started.step.update
    scale, state = update.loss_scale, state_of(started)
    value = float(scale.value if FRAMEWORK == "torch" else scale.value.numpy())
    everyone = started.workers.allgather_object((value, int(state["optimizer/step"])))
    assert everyone == [(2.0**15, 2 if started.workers.size > 1 else 1)] * started.workers.size
