"""A job of two in which Horovod ends on rank 1 inside of a step of PyTorch; rank 0 goes on alone.

    horovodrun -np 2 --gloo python tests/contract/job_shut_down_in_step_torch.py NUMBER

NUMBER: which reduction of the step, in their order, rank 1 does not begin. Rank 0 prints what it found as
JSON.
"""

import json
import os
import sys

import horovod.torch as hvd
import numpy as np
from horovod.torch import mpi_ops

from hvdtrain.backends import load_backend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import PeerLostError

RANDOM = np.random.RandomState(3)
X, Y = RANDOM.randn(16, 5).astype(np.float32), RANDOM.randn(16, 3).astype(np.float32)
CONFIG = Config(framework="torch", device="cpu", threads=1, momentum=0.9, ema_decay=0.9)


class Normed:
    loss = "mse"

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank, size, step):
    own = slice(rank, None, size)
    weights = np.ones((1, 16 // size), np.float32)
    arrays = {"inputs": X[None, own], "targets": Y[None, own]}
    return HostBatch(step, arrays, weights, 16.0, np.arange(16)[None, own])


def train(backend, step):
    host = batch(backend.workers.rank, backend.workers.size, step)
    return backend.train_step(next(iter(backend.to_device([host]))), 0.1).read().sums["loss"]


def everything(backend):
    return {name: value.tobytes() for name, value in backend._state.snapshot().read().items()}


def main():
    backend = load_backend(CONFIG)
    workers = backend.workers
    workers.is_elastic, workers.most = True, 2
    backend.build(Normed(), CONFIG)
    backend.broadcast_state(0)
    for step in range(2):
        train(backend, step)
    before, left, error = everything(backend), int(sys.argv[1]), ""
    begin = hvd.allreduce_async_

    def begin_or_end(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0 and workers.rank == 1:
            hvd.shutdown()
        return begin(*args, **kwargs)

    hvd.allreduce_async_ = begin_or_end
    try:
        train(backend, 2)
    except PeerLostError as lost:
        error = str(lost.__cause__)
    hvd.allreduce_async_ = begin
    is_undone = everything(backend) == before
    hvd.shutdown()
    if workers.rank == 1:
        return
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        del os.environ[name]
    os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    hvd.init()
    state = backend._state.snapshot().read()
    workers.size = 1
    backend.enter_world()
    loss, after = train(backend, 2), everything(backend)
    workers.is_elastic = False
    backend.build(Normed(), CONFIG)  # a worker that was alone all the time
    backend._state.load(state)
    is_right = train(backend, 2) == loss and everything(backend) == after
    handles = len(mpi_ops._handle_map)
    found = {"error": error, "handles": handles, "is_undone": is_undone, "is_right": is_right}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
