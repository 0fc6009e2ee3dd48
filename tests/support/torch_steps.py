"""Steps of PyTorch's backend with eight samples, for tests in one process."""

import numpy as np
import torch

from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import BatchPlan

SAMPLES, INPUTS, OUTPUTS = 8, 3, 2
X = np.random.RandomState(1).randn(SAMPLES, INPUTS).astype(np.float32)
Y = np.random.RandomState(2).randn(SAMPLES, OUTPUTS).astype(np.float32)


def backend_of(workers, task, **fields):
    torch.set_num_threads(1)
    backend = TorchBackend(workers, torch.device("cpu"))
    backend.build(task, Config(framework="torch", device="cpu", threads=1, **fields))
    return backend


def host_batch(backend, step=0, accumulate=1, *, times=1, in_warmup=False):
    """Give this worker's part of a batch, whose inputs are multiplied by a number."""
    places, real = BatchPlan(SAMPLES, backend.workers.size, accumulate).part(backend.workers.rank, SAMPLES)
    arrays = {"inputs": X[places] * np.float32(times), "targets": Y[places]}
    return HostBatch(step, arrays, real.astype(np.float32), float(SAMPLES), places, in_warmup=in_warmup)


def step(backend, number=0, accumulate=1, **fields):
    (batch,) = backend.to_device([host_batch(backend, number, accumulate, **fields)])
    return backend.train_step(batch, 0.01).read().sums["loss"]


def parameters(backend):
    return [p.detach().clone() for p in backend.model.parameters()]
