"""Horovod's reductions of PyTorch between threads of one process, each of which is a worker.

What workers would wait for in vain is an error after seconds, so that a test needs no job of several workers.
"""

import threading
from collections import Counter
from functools import partial

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from support.fakes import on_every_rank

_SECONDS = 5  # that the others have to join a reduction
NAMES = (
    *("allreduce_", "allreduce_async", "allreduce_async_", "synchronize"),
    *("allgather", "allgather_async", "alltoall"),
)


class FakedHorovod:
    """Replaces the reductions for the threads of ``run``; ``failing`` names the sum that fails, by rank."""

    def __init__(self, monkeypatch, size=2):
        self.begun = [[] for _ in range(size)]
        self.failing = [None] * size
        self._size = size
        self._rank = threading.local()
        self._joined = threading.Condition()
        self._given = {}  # by name and how often it came before, what each rank has given
        self._counts = [Counter() for _ in range(size)]
        for name in NAMES:
            monkeypatch.setattr(hvd, name, getattr(self, name))

    def run(self, work):
        """Run ``work(workers)`` on each worker; return what each returned, or raise what one raised."""

        def of_rank(workers):
            self._rank.number = workers.rank
            return work(workers)

        found = on_every_rank(["here"] * self._size, of_rank)
        errors = [one for one in found if isinstance(one, Exception)]
        if errors:
            raise errors[0]
        return found

    def allreduce_async_(self, tensor, *, name, op=None, postscale_factor=1.0):
        del op
        return partial(self._summed, tensor, self._begin(name, tensor), postscale_factor)

    def allreduce_async(self, tensor, **arguments):
        return self.allreduce_async_(tensor.clone(), **arguments)

    def allreduce_(self, tensor, **arguments):
        return self.synchronize(self.allreduce_async_(tensor, **arguments))

    def allgather_async(self, tensor, *, name):
        assert len(tensor)  # messages without content are nothing to rely on
        key = self._begin(name, tensor)
        return lambda: torch.cat(self._all(key, ragged=True))

    def allgather(self, tensor, **arguments):
        return self.synchronize(self.allgather_async(tensor, **arguments))

    def alltoall(self, tensor, *, name):
        parts = [one.chunk(self._size)[self._rank.number] for one in self._all(self._begin(name, tensor))]
        return torch.cat(parts)

    def synchronize(self, handle):
        return handle()

    def _begin(self, name, tensor):
        rank = self._rank.number
        with self._joined:
            key = name, self._counts[rank][name]
            self._counts[rank][name] += 1
            self.begun[rank].append(name)
            self._given.setdefault(key, {})[rank] = tensor.detach().clone()
            self._joined.notify_all()
        return key

    def _all(self, key, ragged=False):
        with self._joined:
            if not self._joined.wait_for(lambda: len(self._given[key]) == self._size, _SECONDS):
                raise AssertionError(f"only the ranks {sorted(self._given[key])} joined {key}")
            given = [self._given[key][rank] for rank in range(self._size)]
        shapes = {(tuple(one.shape[ragged:]), one.dtype, one.layout) for one in given}
        assert len(shapes) == 1, f"{key}: {shapes}"
        return given

    def _summed(self, tensor, key, factor):
        total = sum(self._all(key)) * factor
        if key[0] == self.failing[self._rank.number]:
            raise HorovodInternalError("a worker was lost, for a test")
        return tensor.copy_(total)
