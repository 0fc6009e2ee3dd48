"""A whole elastic job in one process: its workers are threads, and a condition is the driver."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.backends.records import StatePart
from hvdtrain.backends.step_metrics import NO_SIGNALS
from hvdtrain.errors import JobEnded, PeerLostError
from hvdtrain.workers.wire import decode, encode
from hvdtrain.workers.world import Change, MemberInfo, TrainingPosition, World
from support.elastic_driver import world
from support.fakes import FakeWorkers
from support.numpy_backend import NumpyBackend

_SECONDS = 120  # a machine that is busy with other tests is slow


class _Exchange:
    """How the workers of one world reach each other; broken for all when one of them is lost."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = size * [None]

    def gather(self, rank: int, value: Any) -> list[Any]:
        try:
            self.slots[rank] = value
            self.barrier.wait(_SECONDS)
            gathered = list(self.slots)
            self.barrier.wait(_SECONDS)
        except threading.BrokenBarrierError:
            raise PeerLostError("a collective operation failed because another worker ended") from None
        return gathered


class FakeDriver:
    """Forms a world whenever all workers wait for one; the state of ``torn`` ones is not whole."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self.worlds: list[tuple[int, TrainingPosition, str]] = []
        self._news = threading.Condition()
        self._formed: dict[str, tuple[World, _Exchange]] = {}
        self._ready: dict[str, tuple[TrainingPosition, bool]] = {}
        self._ranks: dict[str, int] = {}
        self._gone: list[str] = []
        self._joined: list[str] = []
        self._expected: set[str] = set()
        self._exchange: _Exchange | None = None
        self.stop, self.why_stop = 0, ""
        self.is_trained, self.run_dir = False, ""
        self.torn: set[str] = set()
        self.exit_code: int | None = None

    def expect(self, *names: str) -> None:
        """Wait for these workers before the next world."""
        with self._news:
            self._expected |= set(names)

    @property
    def wants_change(self) -> bool:
        with self._news:
            return bool(self._joined)

    def lose(self, name: str) -> None:
        """A worker is lost: the collectives of its world fail."""
        with self._news:
            self._expected.discard(name)
            self._gone.append(f"{name}: killed (SIGKILL)")
            if self._exchange is not None:
                self._exchange.barrier.abort()
            self._form()

    def next_world(self, name: str, place: TrainingPosition, valid: bool) -> tuple[World, _Exchange]:
        with self._news:
            if name not in self._expected:
                self._expected.add(name)
                self._joined.append(name)
            self._ready[name] = place, valid and name not in self.torn
            self._form()
            is_over = lambda: name not in self._ready or self.exit_code is not None  # noqa: E731
            assert self._news.wait_for(is_over, _SECONDS), f"{name} waits for ever"
            if name in self._ready:
                raise JobEnded("", exit_code=self.exit_code)
            return self._formed[name]

    def done(self, exit_code: int) -> None:
        """Training is over: there is no other world."""
        with self._news:
            self.exit_code = exit_code
            self._news.notify_all()

    def _form(self) -> None:
        if set(self._ready) != self._expected or not self._ready:
            return
        order = sorted(self._ready, key=self._order)
        root, is_valid = self._ready[order[0]]
        members = tuple(
            MemberInfo(
                worker=name,
                rank=rank,
                host="here",
                pid=rank,
                place=self._ready[name][0],
                is_new=name not in self._ranks,
            )
            for rank, name in enumerate(order)
        )
        source = "root" if is_valid else "checkpoint" if self.is_trained else "start"
        change = Change(left=tuple(self._gone), joined=tuple(self._joined), why="the workers change")
        fields = {"host": "here", "source": source, "why": self.why_stop, "members": members}
        fields |= {"change": change if self.worlds else None, "run_dir": self.run_dir}
        self._exchange = _Exchange(len(order))
        self.worlds.append((len(order), root, source))
        self._formed = {
            name: (world(len(self.worlds), rank, len(order), **fields), self._exchange)
            for rank, name in enumerate(order)
        }
        self._ranks = {name: rank for rank, name in enumerate(order)}
        self._gone, self._joined = [], []
        self._ready.clear()
        self._news.notify_all()

    def _order(self, name: str) -> tuple[Any, ...]:
        """Return what ranks are ordered by: rank 0 is valid and furthest, and the old one among equals."""
        place, valid = self._ready[name]
        return not valid, -place.step, -place.stage, self._ranks.get(name, 99), name


class FakeMembership:
    """A worker's part in the job of a ``FakeDriver``."""

    job, slot, lost_lease = "job", 0, ""

    def __init__(self, driver: FakeDriver, name: str, is_joining: bool = False) -> None:
        self.driver, self.worker, self.is_joining = driver, name, is_joining
        self.orders = driver
        self.least, self.most, self.world = 1, driver.most, None
        self.exchange: _Exchange | None = None
        self.said: list[Any] = []

    def next_world(self, place, *, valid, values):
        self.world, self.exchange = None, None
        self.values = dict(values)
        self.world, self.exchange = self.driver.next_world(self.worker, place, valid)
        return self.world

    def ignored(self, *_):
        """Change nothing."""

    enter = formed = form_failed = explain = ignored

    def synced(self, place, run_dir):
        self.driver.is_trained, self.driver.run_dir = True, run_dir

    def failed(self, error):
        self.said.append(("failed", error))
        self.driver.lose(self.worker)

    def done(self, exit_code):
        self.said.append(("done", exit_code))
        self.driver.done(exit_code)


class ElasticWorkers(FakeWorkers):
    """The workers of a job as one thread sees them; alone before the first world."""

    def __init__(self, membership: FakeMembership) -> None:
        super().__init__(0, ["here"], None, [])
        self._membership = membership
        self._exchange: _Exchange | None = None
        self.controller = self.coordination = "Gloo"
        self.is_elastic, self.least, self.most = True, membership.least, membership.most

    def restart(self, world):
        self._exchange = self._membership.exchange
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.barrier()

    def leave(self, *, broken):
        if broken and self._exchange is not None:
            self._exchange.barrier.abort()
        self._exchange = None

    def allgather_object(self, value):
        if self._exchange is None:
            return [value]
        return [decode(slot) for slot in self._exchange.gather(self.rank, encode(value))]

    def have_failed(self):
        return False


class ElasticNumpyBackend(NumpyBackend):
    """The numpy backend of workers that sum in the order of ranks; ``before`` gets each call's name."""

    def __init__(self, workers: ElasticWorkers, before: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(workers)
        self._before = before

    def _summed(self, arrays):
        everyone = self.workers.allgather_object(arrays)
        return [np.sum(parts, axis=0) for parts in zip(*everyone, strict=True)]

    def train_step(self, batch, learning_rate, signals=NO_SIGNALS):
        self._before("train_step")
        return super().train_step(batch, learning_rate, signals)

    def enter_world(self) -> None:
        pass

    def warm_up(self, batch, eval_batch=None) -> None:
        before = self._state()
        self.train_step(batch, 0.0)
        if eval_batch is not None:
            self.eval_step(eval_batch)
        self._load(before)

    def gather_state(self, spool=None):
        self.workers.barrier()
        state = super().gather_state(spool)
        return state if self.workers.rank == 0 else None

    def scatter_state(self, state, part=StatePart.ALL):
        self.workers.barrier()
        if self.workers.rank == 0:
            super().scatter_state(state, part)
        self.broadcast_state(0)

    def broadcast_state(self, root):
        self._before("broadcast_state")
        self._load(self.workers.broadcast_object(self._state() if self.workers.rank == root else None, root))
