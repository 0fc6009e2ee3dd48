"""The workers of an elastic job as its driver knows them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvdtrain.elastic.driver.cluster import Limits, Slot
from hvdtrain.elastic.driver.events import Action, Kill, Say, Start
from hvdtrain.elastic.messages import Failed, Hello, Ready
from hvdtrain.elastic.watch.connections import BEAT_SECONDS, Member, WorkerState
from hvdtrain.host.hostfile import HostSlots

DEFAULT_STALL_SECONDS = 120.0  # until a worker has said what the job's is

_UNANSWERED_SECONDS = 5 * BEAT_SECONDS  # a worker that was silent for so long is sent no beats
_CONFIRM_SECONDS = 3.0  # in which the end of a process that was killed is seen
_EXIT_SECONDS = 0.2  # from the end of a connection to the exit code of its process
_LEASE_MARGIN_SECONDS = 2.0
_SLOT_SECONDS = 10.0  # after which the slot of a lost worker is free, whatever its launcher says


class Stage(Enum):
    """What a worker is at, as far as its driver knows."""

    STARTED = "started"  # its process was started, and has not connected yet
    BUILDING = "building"  # it is connected, and builds its model alone
    READY = "ready"  # its training thread waits for a world
    ENTERING = "entering"  # it starts Horovod in a world
    SYNCING = "syncing"  # it is in a world, and receives the state
    TRAINING = "training"
    GOING = "going"  # it is about to end, as it said or was instructed
    LOST = "lost"  # it is no part of the job any more, and is being ended


IN_WORLD = (Stage.ENTERING, Stage.SYNCING, Stage.TRAINING)
ALIVE = (Stage.STARTED, Stage.BUILDING, Stage.READY, *IN_WORLD)


@dataclass(eq=False)
class Worker:
    """One process of a worker."""

    name: str  # its name, such as "w7"
    slot: Slot  # where it runs
    since: float  # when it was started, or when its stage changed
    stage: Stage = Stage.STARTED  # what it is at
    hello: Hello | None = None  # its first message; None until it is connected
    ready: Ready | None = None  # its last ``Ready``
    values: Mapping[str, str] = field(default_factory=dict)  # what its first one said
    state: WorkerState | None = None  # what its training thread does
    heard: float = 0.0  # when it was last heard
    generation: int = 0  # the last world that it was instructed to enter; 0 if none
    rank: int = 0  # its rank in that world
    wants_out: str = ""  # why it is to leave the job; empty if it stays
    is_removed: bool = False  # whether it is to leave because its slot is no longer there
    reason: str = ""  # why it ended or was ended, as text
    failure: Failed | None = None  # what it said when it failed
    exit_code: int | None = None  # that of its process; None while it runs, as far as is known
    failed_in: int | None = None  # the world in which it failed; None if it did not fail
    is_late: bool = False  # whether it did not come in time
    is_counted: bool = False  # whether the failure was taken note of
    is_connected: bool = False  # whether its connection stands
    is_unreachable: bool = False  # whether its host stopped to respond
    is_out: bool = False  # whether it has left in order, so that nobody waits for its end
    end_by: float = float("inf")  # when it is killed if it is still there, if it is about to end
    settled_by: float = float("inf")  # when a lost worker counts as gone, even if nothing says so

    def __str__(self) -> str:
        """Return who it is, such as "rank 2 on h2"."""
        return f"rank {self.rank} on {self.slot.host}" if self.generation else f"the worker on {self.slot}"

    def member(self) -> Member:
        """Return the worker as messages of the watch name it."""
        return Member(self.rank, self.slot.host)

    def is_silent(self, now: float) -> bool:
        """Return whether it has not been heard for a while."""
        return now - self.heard > _UNANSWERED_SECONDS

    def is_settled(self, now: float) -> bool:
        """Return whether it can no longer do anything in the worlds that it knew.

        The exit code alone does not say so: on another host it may be that of ssh.
        """
        is_gone = not self.is_connected and not self.is_unreachable
        return self.is_out or is_gone or now >= self.settled_by

    def holds_slot(self, now: float) -> bool:
        """Return whether its slot is taken."""
        return now < self.settled_by + _SLOT_SECONDS and (self.is_connected or self.exit_code is None)


class Roster:
    """All workers that are there, or whose end is still awaited."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease = lease_seconds
        self._workers: dict[str, Worker] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def find(self, name: str) -> Worker | None:
        """Return a worker; None if there is none of this name."""
        return self._workers.get(name)

    def add(self, slot: Slot, now: float) -> Worker:
        """Return a new worker with a name that no other had."""
        self._count += 1
        worker = Worker(f"w{self._count}", slot, now, heard=now)
        self._workers[worker.name] = worker
        return worker

    def at(self, *stages: Stage) -> list[Worker]:
        """Return the workers that are at one of these stages, in the order of their arrival."""
        return [worker for worker in self._workers.values() if worker.stage in stages]

    def stall_timeout(self) -> float:
        """Return the longest time without an answer or progress that the workers state; 0 for no limit."""
        stated = [worker.ready.stall_timeout for worker in self._workers.values() if worker.ready]
        return max(stated, default=DEFAULT_STALL_SECONDS)

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """Take note that a worker is no part of the job any more. Its end is not sure yet.

        A worker may write files until its lease is over, which the last beat that it got began.
        """
        worker.reason = worker.reason or reason
        worker.stage, worker.since, worker.end_by = Stage.LOST, now, float("inf")
        if worker.is_unreachable:  # for as long as its host is silent, it has got no beat
            worker.settled_by = now + _LEASE_MARGIN_SECONDS
            return
        beaten = min(now, worker.heard + _UNANSWERED_SECONDS + BEAT_SECONDS)
        lease_ends = beaten + self._lease + _LEASE_MARGIN_SECONDS
        worker.settled_by = max(now + _CONFIRM_SECONDS, lease_ends)

    def unsettled(self, now: float) -> list[Worker]:
        """Return the workers that were in a world, are to be in no other, and may still do something."""
        leaving = [worker for worker in self.at(Stage.LOST, Stage.GOING) if worker.generation]
        return [one for one in leaving if not one.is_settled(now) or self._is_unexplained(one, now)]

    def _is_unexplained(self, worker: Worker, now: float) -> bool:
        """Return whether the exit code, which says why a worker ended, is about to arrive."""
        is_awaited = worker.exit_code is None and not worker.is_out
        return is_awaited and worker.stage is Stage.LOST and now < worker.since + _EXIT_SECONDS

    def taken_slots(self, now: float) -> Collection[Slot]:
        """Return the slots that have a worker, or one whose end is not sure."""
        return {one.slot for one in self._workers.values() if one.holds_slot(now)}

    def clean(self, now: float) -> None:
        """Forget the workers that are gone for good."""
        for worker in self:
            is_done = worker.stage is Stage.LOST and worker.is_settled(now)
            if is_done and not worker.holds_slot(now):
                del self._workers[worker.name]

    def ticks(self) -> list[float]:
        """Return when something is due."""
        times = [one.end_by for one in self._workers.values()]
        for one in self.at(Stage.LOST):
            times += [one.since + _EXIT_SECONDS, one.settled_by, one.settled_by + _SLOT_SECONDS]
        return times


FIRST_SECONDS = 1.0
FORGOTTEN_SECONDS = 600.0
_ATTEMPTS = 2  # for each worker, while nothing has been trained: then the last failure ends the job


class Staffing:
    """Gives free slots a worker, as long as fewer run than the job wants."""

    def __init__(self, limits: Limits, roster: Roster, do: Callable[[Action], None]) -> None:
        self._limits, self._roster, self._do = limits, roster, do
        self._hosts: Sequence[HostSlots] = ()
        self._failures: dict[Slot, list[float]] = {}
        self._ready_at: dict[Slot, float] = {}  # from when on a slot may get a worker again
        self._early = 0  # failures before anything was trained

    @property
    def slots(self) -> list[Slot]:
        """All slots, in the order in which they get workers."""
        return [Slot(one.name, number) for one in self._hosts for number in range(one.slots)]

    def slots_on(self, host: str) -> int:
        """Return the number of slots of a host, at least 1."""
        return max([1, *(one.slots for one in self._hosts if one.name == host)])

    def discover(self, hosts: Sequence[HostSlots], now: float) -> None:
        """Take the hosts that there are now; a worker whose slot is gone is to leave, until it is back."""
        before, self._hosts = set(self.slots), hosts
        there = set(self.slots)
        for slot in before - there:  # if it comes back, it may get a worker at once
            self._ready_at.pop(slot, None)
        for worker in self._roster.at(*ALIVE):
            if worker.slot in there:
                if _is_removed_only(worker):
                    worker.wants_out, worker.is_removed = "", False
                continue
            if worker.wants_out:
                continue
            reason = _removal_of(worker)
            if worker.stage in (*IN_WORLD, Stage.READY):
                worker.wants_out, worker.is_removed = reason, True
            else:
                self._roster.lose(worker, reason, now)
                self._do(Kill(worker.name))

    def hire(self, wanted: int, now: float) -> None:
        """Start workers in free slots until there are as many as wanted."""
        for slot in self._due(wanted, now):
            if self._ready_at.get(slot, 0.0) <= now:
                worker = self._roster.add(slot, now)
                self._do(Start(worker.name, slot))

    def failed(self, worker: Worker, has_begun: bool, now: float) -> None:
        """Leave the slot of a worker that failed out for a while."""
        shortest, longest = self._limits.cooldown_seconds
        recent = [at for at in self._failures.get(worker.slot, []) if now - at < FORGOTTEN_SECONDS]
        self._failures[worker.slot] = [*recent, now][-32:]
        doubled = shortest * 2.0 ** min(len(recent) + 1, 30)
        seconds = min(longest, doubled) if recent else FIRST_SECONDS
        self._ready_at[worker.slot] = now + seconds
        if not has_begun:
            self._early += 1
        again = f"; its slot is used again after {seconds:.0f} s" if seconds > 1 else ""
        self._do(Say(f"{worker} {worker.reason}{again}"))

    def left(self, worker: Worker, now: float) -> None:
        """Leave the slot of a worker that left on request out for the longest time.

        A slot that was gone and is back may be used at once.
        """
        if worker.slot in self.slots and not _is_removed_only(worker):
            self._ready_at[worker.slot] = now + self._limits.cooldown_seconds[1]

    def is_hopeless(self) -> bool:
        """Return whether as many workers failed as the job needs, and again, before anything was trained."""
        return self._early >= _ATTEMPTS * self._limits.wanted

    def ticks(self, wanted: int, now: float) -> list[float]:
        """Return when a slot may get a worker again."""
        return [self._ready_at.get(slot, 0.0) for slot in self._due(wanted, now)]

    def _due(self, wanted: int, now: float) -> list[Slot]:
        """Return the free slots that are to get a worker now, or once they are no longer left out."""
        alive = sum(not worker.wants_out for worker in self._roster.at(*ALIVE))
        if alive >= wanted:
            return []
        taken = self._roster.taken_slots(now)
        free = [slot for slot in self.slots if slot not in taken]
        return sorted(free, key=lambda slot: max(now, self._ready_at.get(slot, 0.0)))[: wanted - alive]


def _removal_of(worker: Worker) -> str:
    return f"{worker.slot} is no longer among the hosts"


def _is_removed_only(worker: Worker) -> bool:
    return worker.is_removed and worker.wants_out == _removal_of(worker)
