"""Adasum: what workers move to together, against the formula in numpy, parameter by parameter.

Run inside a job as ``suite_backend.py`` is; ``test_contract.py`` does so.
"""

import os

import numpy as np
import pytest

from hvdtrain.backends import load_backend
from hvdtrain.backends.portable.initial_values import with_initial_values
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import BatchPlan
from hvdtrain.errors import ConfigError

FRAMEWORK = os.environ.get("HVDTRAIN_TEST_FRAMEWORK", "torch")
SAMPLES, INPUTS, OUTPUTS, STEPS, EVERY = 12, 5, 3, 4, 2
RANDOM = np.random.RandomState(11)
X = RANDOM.randn(STEPS, SAMPLES, INPUTS).astype(np.float32)
Y = RANDOM.randn(STEPS, SAMPLES, OUTPUTS).astype(np.float32)
KERNEL, BIAS, RATE, MOMENTUM = "model/0/kernel", "model/0/bias", 0.1, 0.5


class Linear:
    """A matrix and a bias, whose gradients are easily written down."""

    loss = "mse"

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, OUTPUTS))

    def tf_model(self):
        from keras import Input, Sequential, layers

        return Sequential([Input((INPUTS,)), layers.Dense(OUTPUTS, name="0")])


@pytest.fixture(scope="module")
def started():
    """Start Horovod once; each test builds anew on it."""
    backend = load_backend(config())
    yield backend
    if "HVDTRAIN_TEST_POOL" not in os.environ:  # MPI starts only once in a process
        backend.close()


def config(**fields):
    wanted = {"device": "cpu", "threads": 1, "momentum": MOMENTUM, "sync_every": EVERY}
    return Config(framework=FRAMEWORK, outer_optimizer="adasum", **{**wanted, **fields})


def can_combine(backend):
    workers = backend.workers
    return workers.size == 1 or (workers.controller == "MPI" and workers.size in {2, 4})


def build(backend, **fields):
    if not can_combine(backend):
        pytest.skip("these workers cannot have Adasum")
    info = backend.build(Linear(), config(**fields))
    backend.scatter_state(with_initial_values(state_of(backend), 0))
    return info


def state_of(backend):
    return backend._state.snapshot().read()


def batch(backend, step, samples=SAMPLES):
    places, real = BatchPlan(SAMPLES, backend.workers.size, 1).part(backend.workers.rank, samples)
    arrays = {"inputs": X[step][places], "targets": Y[step][places]}
    host = HostBatch(step, arrays, real.astype(np.float32), float(samples), places)
    return next(iter(backend.to_device([host])))


def combined(movements):
    """Combine two by two, as the paper has it."""
    if len(movements) == 1:
        return movements[0]
    pairs = []
    for a, b in zip(movements[::2], movements[1::2], strict=True):
        product = (a * b).sum()
        pairs.append((1 - product / (2 * (a * a).sum())) * a + (1 - product / (2 * (b * b).sum())) * b)
    return combined(pairs)


def expected(workers, state, steps):
    start = {name: state[name].astype(np.float64) for name in (KERNEL, BIAS)}
    own = [dict(start) for _ in range(workers)]
    slots = [dict.fromkeys(start, 0.0) for _ in range(workers)]
    for step in range(steps):
        for rank in range(workers):
            places, _ = BatchPlan(SAMPLES, workers, 1).part(rank, SAMPLES)
            x, y = X[step][places[0]], Y[step][places[0]]
            error = 2 * (x @ own[rank][KERNEL] + own[rank][BIAS] - y) / (len(x) * OUTPUTS)
            gradients = {KERNEL: x.T @ error, BIAS: error.sum(0)}
            slots[rank] = {name: MOMENTUM * slots[rank][name] + gradients[name] for name in start}
            own[rank] = {name: own[rank][name] - RATE * slots[rank][name] for name in start}
        if (step + 1) % EVERY == 0:
            start = {name: start[name] + combined([one[name] - start[name] for one in own]) for name in start}
            mean = {name: np.mean([one[name] for one in slots], 0) for name in start}
            own, slots = [dict(start) for _ in own], [dict(mean) for _ in slots]
    return start, mean


def test_each_parameter_moves_by_the_formula(started):
    build(started)
    before = state_of(started)
    for step in range(STEPS):
        started.train_step(batch(started, step), RATE)
        if (step + 1) % EVERY == 0:
            started.synchronize().read()
    found = state_of(started)
    result, slots = expected(started.workers.size, before, STEPS)
    for name in (KERNEL, BIAS):
        np.testing.assert_allclose(found[name], result[name], atol=1e-6, err_msg=name)
        slot = f"optimizer/momentum/{name.removeprefix('model/')}"
        np.testing.assert_allclose(found[slot], slots[name], atol=1e-6, err_msg=slot)
    everyone = started.workers.allgather_object({name: array.tobytes() for name, array in found.items()})
    assert all(one == everyone[0] for one in everyone)


def test_a_worker_without_samples_changes_nothing(started):
    build(started, sync_every=1)
    before = state_of(started)[KERNEL]
    started.train_step(batch(started, 0, samples=1), RATE)
    kernels = started.workers.allgather_object(state_of(started)[KERNEL])
    moved = [kernel for kernel in kernels if not np.array_equal(kernel, before)]
    assert len(moved) == 1
    started.synchronize().read()
    np.testing.assert_allclose(state_of(started)[KERNEL], moved[0], atol=1e-6)


def test_what_travels_is_described(started):
    assert "every 2 steps the workers combine by Adasum what each parameter moved" in build(started).reduction


def test_workers_that_cannot_have_it_refuse_it(started):
    if can_combine(started):
        pytest.skip("these workers can have Adasum")
    reason = "Gloo: Horovod has it over MPI alone" if started.workers.controller == "Gloo" else "3 workers"
    with pytest.raises(ConfigError, match=f"outer_optimizer adasum cannot be used with {reason}") as caught:
        started.build(Linear(), config())
    assert caught.value.everywhere
