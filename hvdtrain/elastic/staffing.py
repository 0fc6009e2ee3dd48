"""Which slots of an elastic job get a worker, and whose worker has to leave."""

from collections.abc import Callable, Sequence

from hvdtrain.elastic.backoff import Backoff
from hvdtrain.elastic.driver.cluster import Limits, Slot
from hvdtrain.elastic.driver.events import Action, Kill, Say, Start
from hvdtrain.elastic.driver.roster import ALIVE, IN_WORLD, Roster, Stage, Worker
from hvdtrain.host.hostfile import HostSlots

_ATTEMPTS = 2  # for each worker, while nothing has been trained: then the last failure ends the job


class Staffing:
    """Gives free slots a worker, as long as fewer run than the job wants.

    Args:
        limits: what the job may have.
        roster: its workers.
        do: takes actions.
    """

    def __init__(self, limits: Limits, roster: Roster, do: Callable[[Action], None]) -> None:
        self._limits, self._roster, self._do = limits, roster, do
        self._hosts: Sequence[HostSlots] = ()
        self._backoff = Backoff(limits.cooldown_seconds)
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
        for slot in before - there:
            self._backoff.forget(slot)
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
            if self._backoff.ready_at(slot) <= now:
                worker = self._roster.add(slot, now)
                self._do(Start(worker.name, slot))

    def failed(self, worker: Worker, has_begun: bool, now: float) -> None:
        """Leave the slot of a worker that failed out for a while."""
        seconds = self._backoff.failed(worker.slot, now)
        if not has_begun:
            self._early += 1
        again = f"; its slot is used again after {seconds:.0f} s" if seconds > 1 else ""
        self._do(Say(f"{worker} {worker.reason}{again}"))

    def left(self, worker: Worker, now: float) -> None:
        """Leave the slot of a worker that left as it was asked to out for the longest time.

        A slot that was gone and is back may be used at once.
        """
        if worker.slot in self.slots and not _is_removed_only(worker):
            self._backoff.left(worker.slot, now)

    def is_hopeless(self) -> bool:
        """Return whether as many workers failed as the job needs, and again, before anything was trained."""
        return self._early >= _ATTEMPTS * self._limits.wanted

    def ticks(self, wanted: int, now: float) -> list[float]:
        """Return when a slot may get a worker again."""
        return [self._backoff.ready_at(slot) for slot in self._due(wanted, now)]

    def _due(self, wanted: int, now: float) -> list[Slot]:
        """Return the free slots that are to get a worker now, or once they are no longer left out."""
        alive = sum(not worker.wants_out for worker in self._roster.at(*ALIVE))
        if alive >= wanted:
            return []
        taken = self._roster.taken_slots(now)
        free = [slot for slot in self.slots if slot not in taken]
        return sorted(free, key=lambda slot: max(now, self._backoff.ready_at(slot)))[: wanted - alive]


def _removal_of(worker: Worker) -> str:
    return f"{worker.slot} is no longer among the hosts"


def _is_removed_only(worker: Worker) -> bool:
    """Return whether a worker is to leave for no other reason than that its slot was gone."""
    return worker.is_removed and worker.wants_out == _removal_of(worker)
