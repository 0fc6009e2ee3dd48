"""A job of two in which Horovod ends on rank 1 inside of a compiled step; rank 0 goes on alone.

    horovodrun -np 2 --gloo python tests/contract/job_shut_down_in_step_tf.py NUMBER

NUMBER: which reduction of the step, in the order in which they are traced, rank 1 does not begin. Rank 0
prints what it found as JSON.
"""

import contextlib
import json
import os
import sys

import numpy as np

from hvdtrain.backends import load_backend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import PeerLostError

RANDOM = np.random.RandomState(3)
X, Y = RANDOM.randn(16, 5).astype(np.float32), RANDOM.randn(16, 3).astype(np.float32)
CONFIG = Config(framework="tf", device="cpu", threads=1, momentum=0.9, ema_decay=0.9)


class Normed:
    loss = "mse"

    def tf_model(self):
        from keras import Input, Sequential, layers

        hidden = [layers.Dense(8), layers.BatchNormalization(), layers.Activation("tanh")]
        return Sequential([Input((5,)), *hidden, layers.Dense(3)])


def batch(rank, size, step):
    own = slice(rank, None, 2)
    weights = np.ones((1, 8), np.float32)
    arrays = {"inputs": X[None, own], "targets": Y[None, own]}
    return HostBatch(step, arrays, weights, 8.0 * size, np.arange(16)[None, own])


def train(backend, step):
    host = batch(backend.workers.rank, backend.workers.size, step)
    return backend.train_step(next(iter(backend.to_device([host]))), 0.1).read().sums["loss"]


def everything(backend):
    variables = [*backend.model.variables, *backend.parts.slots, *backend.parts.ema.to_broadcast()]
    return [np.asarray(v).tobytes() for v in variables]


def portable(backend):
    return {name: value.tobytes() for name, value in backend._state.snapshot().read().items()}


def main():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    backend, ends = load_backend(CONFIG), [False]
    workers = backend.workers
    workers.is_elastic, workers.most = True, 2
    reduce, numbers = hvd.allreduce, {}

    def reduce_or_end(tensor, **arguments):
        number = len(numbers)
        numbers[number] = arguments["name"]

        def end():
            if ends[0]:
                hvd.shutdown()
            return np.asarray(0.0, np.float32)

        if workers.rank == 1 and number == int(sys.argv[1]) and not tf.executing_eagerly():
            with tf.control_dependencies([tf.numpy_function(end, [], tf.float32)]):
                tensor = tf.identity(tensor)
        return reduce(tensor, **arguments)

    hvd.allreduce = reduce_or_end
    backend.build(Normed(), CONFIG)
    for step in range(2):
        train(backend, step)
    before, ends[0], error = everything(backend), True, ""
    if workers.rank == 1:
        with contextlib.suppress(tf.errors.OpError, PeerLostError):
            train(backend, 2)
        return
    try:
        train(backend, 2)
    except PeerLostError as lost:
        error = str(lost.__cause__)
    is_undone = everything(backend) == before
    hvd.shutdown()
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        del os.environ[name]
    os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    hvd.init()
    state = backend._state.snapshot().read()
    workers.size = 1
    backend.enter_world()
    loss, after = train(backend, 2), portable(backend)
    traces = sum(map(len, backend.step._function(())._known.values()))
    workers.is_elastic = False
    backend.build(Normed(), CONFIG)  # a worker that was alone all the time
    backend._state.load(state)
    is_right = train(backend, 2) == loss and portable(backend) == after
    found = {"error": error, "traces": traces}
    print(json.dumps(found | {"is_undone": is_undone, "is_right": is_right}), flush=True)


if __name__ == "__main__":
    main()
