"""How a reduction of PyTorch fails, for ``suite_transaction.py``."""

import time

import horovod.torch as hvd
import numpy as np
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

# what the backend calls, in modules that look it up when they call it
NAMES = ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "allgather_async", "synchronize")


class Failures:
    """Every reduction, and every wait for one, is a place that may fail."""

    def __init__(self, monkeypatch):
        self._at = None
        for name in NAMES:
            monkeypatch.setattr(hvd, name, self._counted(getattr(hvd, name)))

    def fail(self, number):
        self._at, self._next = number, 0

    def settle(self, backend):
        deadline = time.monotonic() + 180
        backend.workers.barrier()
        while not all(mpi_ops.poll(handle) for handle in mpi_ops._handle_map):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        mpi_ops._handle_map.clear()  # as hvd.init does
        backend.workers.barrier()

    def extra(self, backend):
        texts = {}
        for name, optimizer in backend.parts.optimizers.items():
            for place, group in enumerate(optimizer.param_groups):
                texts |= {f"{name}/{place}/{key}": repr(v) for key, v in group.items() if key != "params"}
        # what an update sets before anything reads it is left out
        return {n: np.frombuffer(t.encode(), np.uint8) for n, t in texts.items() if not n.endswith("/lr")}

    def loss_scale(self, backend):
        if backend.parts.loss_scale is None:
            return {}
        numbers = backend.parts.loss_scale.to_broadcast().tolist()
        return dict(zip(("scale", "steps since change"), numbers, strict=True))

    def set_loss_scale(self, backend, value):
        backend.parts.loss_scale.value = value

    def resize(self, backend, size):
        workers = backend.workers
        workers.rank = hvd.rank() if size > 1 else 0
        workers.size = size

    def _counted(self, function):
        def call(*args, **kwargs):
            number, self._next = self._next, self._next + 1
            if number == self._at:
                raise HorovodInternalError("a worker was lost, for a test")
            return function(*args, **kwargs)

        self._next = 0
        return call
