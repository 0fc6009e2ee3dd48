"""What suites share: files of tests that every worker of one job runs, in the same order.

``pool.run_suite`` starts them; HVDTRAIN_TEST_FRAMEWORK names the framework.
"""

import os

import numpy as np
import pytest

from hvdtrain.backends import load_backend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import BatchPlan

FRAMEWORK = os.environ.get("HVDTRAIN_TEST_FRAMEWORK", "torch")
FOLDER = {"torch": "torch", "tf": "tensorflow"}[FRAMEWORK]
only_torch = pytest.mark.skipif(FRAMEWORK != "torch", reason="of PyTorch alone")


def config(**fields):
    return Config(framework=FRAMEWORK, device="cpu", threads=1, **fields)


@pytest.fixture(scope="module", name="started")
def started_backend():
    """Start Horovod once; each test builds anew on it."""
    backend = load_backend(config())
    yield backend
    if "HVDTRAIN_TEST_POOL" not in os.environ:  # MPI starts only once in a process
        backend.close()


def state_of(backend):
    """Return this worker's own state; what is gathered is rank 0's."""
    return backend._state.snapshot().read()


def load(backend, state):
    """Load a state into this worker alone."""
    backend._state.load(state)


def build(backend, task, **fields):
    """Build a task's model with initial values that are equal on all workers; return what is known of it."""
    info = backend.build(task, config(**fields))
    backend._state.load_initial(0)
    return info


def host_batch(backend, arrays, count, *, accumulate=1, size=None, start=0, **fields):
    """Return this worker's part of the samples [start, start + count), padded as for ``size`` of them."""
    places, real = BatchPlan(size or count, backend.workers.size, accumulate).part(
        backend.workers.rank, count
    )
    indices = start + places
    part = {name: array[indices] for name, array in arrays.items()}
    return HostBatch(fields.pop("step", 0), part, real.astype(np.float32), float(count), indices, **fields)


def on_device(backend, host):
    return next(iter(backend.to_device([host])))


def assert_equal(found, expected, **tolerance):
    """Check that two states have the same names and values: the same bits if no tolerance is given."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if tolerance:
            np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
