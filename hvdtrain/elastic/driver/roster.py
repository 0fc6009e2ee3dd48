"""The workers of an elastic job as its driver knows them."""

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvdtrain.elastic.driver import records
from hvdtrain.elastic.messages import Failed, FromDriver, Hello, Ready
from hvdtrain.elastic.watch.liveness import BEAT_SECONDS, Member, WorkerState
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.workers.world import TrainingPosition

DEFAULT_STALL_SECONDS = 120.0  # until a worker has said what the job's is

_UNANSWERED_SECONDS = 5 * BEAT_SECONDS  # a worker that was silent for so long is sent no beats
_CONFIRM_SECONDS = 3.0  # in which the end of a process that was killed is seen
_EXIT_SECONDS = 0.2  # from the end of a connection to the exit code of its process
_LEASE_MARGIN_SECONDS = 2.0
_SLOT_SECONDS = 10.0  # after which the slot of a lost worker is free, whatever its launcher says

# what ends a process from outside, so that it says nothing of the step
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FROM_OUTSIDE = {0, records.SSH_FAILED, *(-one for one in _SIGNALS), *(128 + one for one in _SIGNALS)}


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
    slot: records.Slot  # where it runs
    since: float  # when it was started, or when its stage changed
    stage: Stage = Stage.STARTED  # what it is at
    hello: Hello | None = None  # its first message; None until it is connected
    ready: Ready | None = None  # its last ``Ready``
    values: Mapping[str, str] = field(default_factory=dict)  # what its first one said
    state: WorkerState | None = None  # what its training thread does
    heard: float = 0.0  # when it was last heard
    generation: int = 0  # the last world that it was instructed to enter; 0 if none
    rank: int = 0  # its rank in that world
    wish: str = ""  # why it wants to leave the job, or cannot be in it; empty if it stays
    is_removed: bool = False  # whether its slot was no longer there before it had such a wish
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

    @property
    def wants_out(self) -> str:
        """Why it is to leave the job; empty if it stays."""
        return self.wish or (f"{self.slot} is no longer among the hosts" if self.is_removed else "")

    @property
    def is_valid(self) -> bool:
        """Whether its state is whole, so that the others may get theirs from it."""
        return self.ready is not None and self.ready.valid and self.generation > 0

    @property
    def is_crash(self) -> bool:
        """Whether its exit code speaks of the process itself and not of whoever ended it."""
        return self.exit_code not in (None, *_FROM_OUTSIDE) and self.failure is None

    @property
    def ending(self) -> str:
        """Its exit code as text, such as "killed (SIGKILL)"."""
        code = self.exit_code or 0
        if code < 0:
            known = -code in {int(one) for one in signal.Signals}
            return f"killed ({signal.Signals(-code).name})" if known else f"killed (signal {-code})"
        meaning = {records.SSH_FAILED: ", as ssh does if it cannot log in or its connection ends"}
        if self.hello is not None:
            meaning[0] = " in the middle of the job (sys.exit() or os._exit(0) in the task?)"
        else:
            meaning |= {
                0: " and did not join the job",
                records.COMMAND_NOT_FOUND: ": the command was not found",
            }
        return f"ended with exit code {code}{meaning.get(code, '')}"

    @property
    def doing(self) -> str:
        """What it did last, to be added to a sentence."""
        return f"; last it was {self.state}" if self.state else ""

    @property
    def place(self) -> TrainingPosition:
        """Its place in the training, as far as it has said so."""
        return self.ready.place if self.ready else TrainingPosition()

    def silence(self, now: float) -> str:
        """Return how long it has not answered, as text."""
        return f"has not answered for {now - self.heard:.0f} s: stopped or starved{self.doing}"

    def member(self) -> Member:
        """Return the worker as messages of the watch name it."""
        return Member(self.rank, self.slot.host)

    def is_silent(self, now: float) -> bool:
        """Return whether it has not been heard for a while."""
        return now - self.heard > _UNANSWERED_SECONDS

    def is_settled(self, now: float) -> bool:
        """Return whether it can do nothing more in its worlds; an exit code may be that of ssh alone."""
        is_gone = not self.is_connected and not self.is_unreachable
        return self.is_out or is_gone or now >= self.settled_by

    def is_unexplained(self, now: float) -> bool:
        """Return whether its exit code, which says why it ended, is about to arrive."""
        is_awaited = self.exit_code is None and not self.is_out
        return is_awaited and self.stage is Stage.LOST and now < self.since + _EXIT_SECONDS

    def holds_slot(self, now: float) -> bool:
        """Return whether its slot is taken."""
        return now < self.settled_by + _SLOT_SECONDS and (self.is_connected or self.exit_code is None)


class Roster:
    """All workers that are there, or whose end is still awaited."""

    def __init__(self, limits: records.Limits) -> None:
        self.limits = limits
        self.actions: list[records.Action] = []  # what is to be done about them
        self._workers: dict[str, Worker] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def do(self, action: records.Action) -> None:
        """Add to what is to be done."""
        self.actions.append(action)

    def send(self, worker: Worker, message: FromDriver) -> None:
        """Let a worker get a message."""
        self.do(records.Send(worker.name, message))

    def kill(self, worker: Worker) -> None:
        """Let the process of a worker be ended."""
        self.do(records.Kill(worker.name))

    def find(self, name: str) -> Worker | None:
        """Return a worker; None if there is none of this name."""
        return self._workers.get(name)

    def add(self, slot: records.Slot, now: float) -> Worker:
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
        lease_ends = beaten + self.limits.silence_seconds + _LEASE_MARGIN_SECONDS
        worker.settled_by = max(now + _CONFIRM_SECONDS, lease_ends)

    def unsettled(self, now: float) -> list[Worker]:
        """Return the workers that were in a world, are to be in no other, and may still do something."""
        leaving = [worker for worker in self.at(Stage.LOST, Stage.GOING) if worker.generation]
        return [one for one in leaving if not one.is_settled(now) or one.is_unexplained(now)]

    def clean(self, now: float) -> None:
        """Forget the workers that are gone for good."""
        for worker in self.at(Stage.LOST):
            if worker.is_settled(now) and not worker.holds_slot(now):
                del self._workers[worker.name]


FIRST_SECONDS = 1.0
FORGOTTEN_SECONDS = 600.0
_ATTEMPTS = 2  # for each worker, while nothing has been trained: then the last failure ends the job


class Staffing:
    """Gives free slots a worker, as long as fewer run than the job wants."""

    def __init__(self, roster: Roster) -> None:
        self._limits, self._roster = roster.limits, roster
        self._hosts: Sequence[HostSlots] = ()
        self._failures: dict[records.Slot, list[float]] = {}
        self._ready_at: dict[records.Slot, float] = {}  # from when on a slot may get a worker again
        self._early = 0  # failures before anything was trained

    @property
    def slots(self) -> list[records.Slot]:
        """All slots, in the order in which they get workers."""
        return [records.Slot(one.name, number) for one in self._hosts for number in range(one.slots)]

    def slots_on(self, host: str) -> int:
        """Return the number of slots of a host, at least 1."""
        return max([1, *(one.slots for one in self._hosts if one.name == host)])

    def discover(self, hosts: Sequence[HostSlots], now: float) -> None:
        """Take the hosts that there are now; a worker whose slot is gone is to leave, until it is back."""
        before, self._hosts = set(self.slots), hosts
        there = set(self.slots)
        for slot in before - there:  # if it comes back, it may get a worker at once
            self._ready_at.pop(slot, None)
        for worker in [one for one in self._roster.at(*ALIVE) if not one.wish]:
            worker.is_removed = worker.slot not in there
            if worker.is_removed and worker.stage not in (*IN_WORLD, Stage.READY):
                self._roster.lose(worker, worker.wants_out, now)
                self._roster.kill(worker)

    def hire(self, wanted: int, now: float) -> None:
        """Start workers in free slots until there are as many as wanted."""
        missing = wanted - sum(not worker.wants_out for worker in self._roster.at(*ALIVE))
        if missing <= 0:
            return
        taken: Collection[records.Slot] = {one.slot for one in self._roster if one.holds_slot(now)}
        free = [slot for slot in self.slots if slot not in taken and self._ready_at.get(slot, 0.0) <= now]
        for slot in free[:missing]:
            self._roster.do(records.Start(self._roster.add(slot, now).name, slot))

    def failed(self, worker: Worker, has_begun: bool, now: float) -> None:
        """Leave the slot of a worker that failed out for a while."""
        shortest, longest = self._limits.cooldown_seconds
        recent = [at for at in self._failures.get(worker.slot, []) if now - at < FORGOTTEN_SECONDS]
        self._failures[worker.slot] = [*recent, now][-32:]
        doubled = shortest * 2.0 ** min(len(recent) + 1, 30)
        seconds = min(longest, doubled) if recent else FIRST_SECONDS
        self._ready_at[worker.slot] = now + seconds
        self._early += not has_begun
        again = f"; its slot is used again after {seconds:.0f} s" if seconds > 1 else ""
        self._roster.do(records.Say(f"{worker} {worker.reason}{again}"))

    def left(self, worker: Worker, now: float) -> None:
        """Leave the slot of a worker that left on request out for the longest time; not one that is back."""
        if worker.slot in self.slots and (worker.wish or not worker.is_removed):
            self._ready_at[worker.slot] = now + self._limits.cooldown_seconds[1]

    @property
    def is_hopeless(self) -> bool:
        """Whether as many workers failed as the job needs, and again, before anything was trained."""
        return self._early >= _ATTEMPTS * self._limits.wanted
