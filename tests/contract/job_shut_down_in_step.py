"""A job of two in which Horovod ends on rank 1 inside of a step; rank 0 goes on alone.

    horovodrun -np 2 --gloo python tests/contract/job_shut_down_in_step.py FRAMEWORK

Rank 1 does not begin the first reduction of the step, in TensorFlow of the compiled one. Rank 0 prints what
it found as JSON.
"""

import contextlib
import json
import os
import sys
from importlib import import_module

import numpy as np

from hvdtrain.backends import load_backend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import PeerLostError

FRAMEWORK = sys.argv[1]
RANDOM = np.random.RandomState(3)
X, Y = RANDOM.randn(16, 5).astype(np.float32), RANDOM.randn(16, 3).astype(np.float32)
CONFIG = Config(framework=FRAMEWORK, device="cpu", threads=1, momentum=0.9, ema_decay=0.9)


class Normed:
    loss = "mse"

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def tf_model(self):
        from keras import Input, Sequential, layers

        hidden = [layers.Dense(8), layers.BatchNormalization(), layers.Activation("tanh")]
        return Sequential([Input((5,)), *hidden, layers.Dense(3)])


def train(backend, step):
    """Train with half of the samples, of which the frameworks have other halves when a worker is alone."""
    rank, size = backend.workers.rank, backend.workers.size
    own = slice(rank, None, 2)
    arrays = {"inputs": X[None, own], "targets": Y[None, own]}
    host = HostBatch(step, arrays, np.ones((1, 8), np.float32), 8.0 * size, np.arange(16)[None, own])
    return backend.train_step(next(iter(backend.to_device([host]))), 0.1).read().sums["loss"]


def portable(backend):
    return {name: value.tobytes() for name, value in backend._state.snapshot().read().items()}


def everything(backend):
    """Return all that a step changes; in TensorFlow, the portable state has not all of it."""
    if FRAMEWORK == "torch":
        return portable(backend)
    variables = [*backend.model.variables, *backend.parts.slots, *backend.parts.ema.to_broadcast()]
    return [np.asarray(v).tobytes() for v in variables]


def ending(workers, hvd, ends):
    """Return the framework's reduction, which ends Horovod on rank 1 once ``ends`` holds something."""
    name = {"torch": "allreduce_async_", "tf": "allreduce"}[FRAMEWORK]
    reduce, seen = getattr(hvd, name), []

    def end(*_):
        if ends and workers.rank == 1:
            hvd.shutdown()
        return np.asarray(0.0, np.float32)

    def reduce_or_end(tensor, **arguments):
        seen.append(arguments["name"])
        if FRAMEWORK == "torch":
            end()
        elif len(seen) == 1:
            import tensorflow as tf

            with tf.control_dependencies([tf.numpy_function(end, [], tf.float32)]):
                tensor = tf.identity(tensor)
        return reduce(tensor, **arguments)

    setattr(hvd, name, reduce_or_end)
    return lambda: setattr(hvd, name, reduce)


def main():
    backend, ends = load_backend(CONFIG), []
    hvd = import_module({"torch": "horovod.torch", "tf": "horovod.tensorflow"}[FRAMEWORK])
    workers = backend.workers
    workers.is_elastic, workers.most = True, 2
    backend.build(Normed(), CONFIG)
    backend.broadcast_state(0)
    restore = ending(workers, hvd, ends)
    for step in range(2):
        train(backend, step)
    before, error = everything(backend), ""
    ends.append(True)
    if workers.rank == 1:
        with contextlib.suppress(Exception):
            train(backend, 2)
        return
    try:
        train(backend, 2)
    except PeerLostError as lost:
        error = str(lost.__cause__)
    is_undone = everything(backend) == before
    if FRAMEWORK == "torch":
        restore()
    hvd.shutdown()
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        del os.environ[name]
    os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    hvd.init()
    state = backend._state.snapshot().read()
    workers.size = 1
    backend.enter_world()
    loss, after = train(backend, 2), portable(backend)
    if FRAMEWORK == "torch":  # what each framework may leave behind, or make anew
        left = len(import_module("horovod.torch.mpi_ops")._handle_map)
    else:
        left = sum(map(len, backend.step._function(())._known.values())) - 1
    workers.is_elastic = False
    backend.build(Normed(), CONFIG)  # a worker that was alone all the time
    backend._state.load(state)
    is_right = train(backend, 2) == loss and portable(backend) == after
    print(
        json.dumps({"error": error, "left": left, "is_undone": is_undone, "is_right": is_right}), flush=True
    )


if __name__ == "__main__":
    main()
