"""When the next world of an elastic job is opened, and with whom."""

from collections.abc import Sequence

from hvdtrain.elastic.driver.job_end import LEFT_SECONDS, JobEnd
from hvdtrain.elastic.driver.records import Say
from hvdtrain.elastic.driver.roster import Roster, Stage, Worker
from hvdtrain.elastic.driver.worlds import State, Worlds
from hvdtrain.elastic.messages import Leave
from hvdtrain.elastic.watch.liveness import LONG_FACTOR, LONG_SECONDS
from hvdtrain.errors import EXIT_ENVIRONMENT, AgreementError
from hvdtrain.workers.agreement import SAME_COMMAND, disagreement
from hvdtrain.workers.world import Source


def arrange(workers: Sequence[Worker], most: int) -> list[Worker]:
    """Return the workers of the next world in the order of ranks, given those that wait longest first.

    Rank 0 is the valid worker with the largest place, the old rank 0 among equals; without a valid worker
    the old rank 0, or the one that waits longest. Its host comes first, and the workers of a host are
    neighbours. Otherwise the old order is kept, and who is new comes last, or is left out beyond ``most``.
    """
    ordered = sorted(workers, key=lambda one: one.rank if one.generation else float("inf"))  # stable
    sources = [one for one in ordered if one.is_valid]
    root = max(sources, key=lambda one: one.place) if sources else ordered[0]  # the first among equals
    chosen = [root, *(one for one in ordered if one is not root)][:most]
    hosts = list(dict.fromkeys(one.slot.host for one in chosen))
    return [one for host in hosts for one in chosen if one.slot.host == host]


def difference_of(workers: Sequence[Worker]) -> AgreementError:
    """Return the error that says in what some workers differ."""
    return disagreement([(one.slot.host, one.values) for one in workers], SAME_COMMAND)


JOIN_SECONDS = 1.0  # in which joiners are collected
LEAVE_SECONDS = 2.0  # in which workers that want to leave are collected
WAIT_SECONDS = 10.0  # between lines that say that the job waits
MAX_UNENTERED = 2  # worlds that those who train could not enter with the same joiners

_FOREVER = float("inf")


class Regrouping:
    """Decides on worlds."""

    def __init__(self, roster: Roster, worlds: Worlds, end: JobEnd, now: float) -> None:
        self._limits, self._roster, self._worlds, self._end = roster.limits, roster, worlds, end
        self.digest = ""  # of what the workers of the first world have in common
        self._start_by = now + self._limits.start_timeout
        self._first_ready = self._change_by = self._wait_until = self._say_at = _FOREVER

    def advance(self, now: float) -> None:
        """Do what has become possible or is due."""
        state = self._worlds.state
        if self._end.is_complete:
            self._end.finish_complete(now)
            return
        if self._end.has_failed_for_good():
            return
        if state is State.TRAINING:
            self._consider_change(now)
        elif state is State.STOPPING:
            self._end.press(now)
        elif state in (State.STARTING, State.CHANGING, State.WAITING):
            self._regroup(now)

    def late(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers outside of a world that must be given up now, with the reason."""
        lost = []
        stall, has_begun = self._roster.stall_timeout(), self._worlds.has_begun
        for worker in self._roster.at(Stage.BUILDING, Stage.READY):
            if stall and now - worker.heard >= max(stall, JOIN_SECONDS):
                lost.append((worker, worker.silence(now)))
        start_limit = 2 * self._limits.start_timeout
        for worker in self._roster.at(Stage.STARTED):
            if now - worker.since >= start_limit:
                worker.is_late = True
                lost.append((worker, f"was still starting after {start_limit:g} s, twice --start-timeout"))
        limit = max(LONG_FACTOR * stall, LONG_SECONDS)
        if has_begun:  # nobody waits for a joiner
            limit = max(limit, LONG_FACTOR * self._limits.start_timeout)
        for worker in self._roster.at(Stage.BUILDING) if stall else []:
            age = now - worker.heard + (worker.state.age_seconds if worker.state else 0.0)
            is_long = has_begun and worker.state is not None and worker.state.is_long
            is_awaited = not has_begun and now - self._first_ready >= limit
            if (age >= limit and not is_long) or is_awaited:
                lost.append((worker, f"was not ready after {limit:.0f} s{worker.doing}"))
        return lost

    # the next world

    def _consider_change(self, now: float) -> None:
        """Let the workers leave the world for those that come or go, once they are collected."""
        if self._end.purpose == "stop":
            self._end.send_stop(now)
            return
        members = self._worlds.members
        leaving = [worker for worker in members if worker.wants_out]
        for worker in self._roster.at(Stage.READY):
            if worker.wants_out:
                self._dismiss(worker, now)
        room = self._limits.most - (len(members) - len(leaving))
        joining = self._roster.at(Stage.READY)[: max(0, room)]
        if len(leaving) == len(members) and not joining and self._awaits_heirs(leaving):
            return  # they train until somebody can take their state
        if self._end.purpose != "train" or not (leaving or joining):
            self._change_by = _FOREVER
            return
        wait = LEAVE_SECONDS if leaving else JOIN_SECONDS
        self._change_by = min(self._change_by, now + wait)
        if now < self._change_by:
            return
        self._change_by = _FOREVER
        if len(leaving) == len(members) and not joining:
            self._end.stop_for_lack(leaving)
            self._end.send_stop(now)
            return
        parts = [f"{worker} leaves: {worker.wants_out}" for worker in leaving]
        parts += [f"a worker on {worker.slot} joins" for worker in joining]
        self._worlds.change("; ".join(parts), now)

    def _regroup(self, now: float) -> None:
        """Open the next world, if all that may be in it are there."""
        if self._worlds.members or self._roster.unsettled(now):
            return None
        ready = self._roster.at(Stage.READY)
        if self._worlds.state is State.STARTING and not self._may_start(ready, now):
            return None
        staying = [worker for worker in ready if not worker.wants_out]
        if self._worlds.unentered >= MAX_UNENTERED and self._end.purpose == "train":
            staying = self._without_joiners(staying)
        if ready and not staying and self._worlds.state is not State.STARTING:
            if self._awaits_heirs(ready):
                staying = ready
            elif self._end.purpose == "train":
                self._end.stop_for_lack(ready)
        if self._end.purpose != "train":
            return self._open(ready, now)
        staying += self._heritage(ready, staying)
        if leaving := [worker for worker in ready if worker not in staying]:
            for worker in leaving:
                self._dismiss(worker, now)
            return self._regroup(now)
        if len(staying) < self._limits.least:
            return self._wait(len(staying), now)
        return self._open(staying, now) if self._agree(staying) else None

    def _without_joiners(self, staying: list[Worker]) -> list[Worker]:
        """Let the workers that were in no world that trained leave, if the others are enough."""
        joiners = [one for one in staying if self._worlds.log.is_new(one)]
        others = [one for one in staying if one not in joiners]
        if not joiners or not others or len(others) < self._limits.least:
            return staying
        unentered, why = self._worlds.unentered, self._worlds.why_broken
        for one in joiners:
            one.wish = f"{unentered} worlds with it could not be entered"
            self._roster.do(Say(f"{one} is left out: {one.wants_out}; the last time {why}"))
        return others

    def _awaits_heirs(self, leaving: list[Worker]) -> bool:
        """Return whether all workers are to leave, but others are about to come in other slots."""
        heirs = self._roster.at(Stage.STARTED, Stage.BUILDING)
        return all(one.is_removed for one in leaving) and bool(heirs)

    def _heritage(self, ready: list[Worker], staying: list[Worker]) -> list[Worker]:
        """Return the worker that is to leave, if nobody else has the state: it hands it over in a world."""
        leaving = [one for one in ready if one.wants_out and one.is_valid]
        if not staying or not leaving or any(one.is_valid for one in staying):
            return []
        return arrange(leaving, 1)

    def _open(self, workers: list[Worker], now: float) -> None:
        arranged = arrange(workers, self._limits.most) if workers else []
        source: Source = "checkpoint" if self._worlds.has_begun else "start"
        if any(one.is_valid for one in arranged):
            source = "root"
        if self._end.purpose != "train" and source != "root":
            return self._end.finish_unsaved()
        self._wait_until = self._say_at = self._change_by = self._start_by = _FOREVER
        self._worlds.open(arranged, source, self._end.purpose, now, why=self._end.why_stopped)
        return None

    def _may_start(self, ready: list[Worker], now: float) -> bool:
        """Return whether the first world is due, or waiting for it is a matter of the elastic timeout."""
        if ready:
            self._first_ready = min(self._first_ready, now)
        if len(ready) >= self._limits.wanted:
            return True
        if now < self._start_by:
            return False
        is_building = bool(self._roster.at(Stage.BUILDING))
        if is_building and now < max(self._start_by, self._first_ready + self._limits.start_timeout):
            return False
        missing = [str(one.slot) for one in self._roster.at(Stage.STARTED, Stage.BUILDING)]
        text = f"{len(ready)} of {self._limits.wanted} workers are ready after the start timeout"
        named = f"; missing: {', '.join(missing)}" if missing else ""
        if self._say_at == _FOREVER:
            self._roster.do(Say(text + named))
        return True

    def _agree(self, workers: list[Worker]) -> bool:
        """Return whether the workers of the first world have equal values; otherwise end the job."""
        digests = [worker.ready.digest for worker in workers if worker.ready]
        if self.digest or len(set(digests)) == 1:
            self.digest = self.digest or digests[0]
            return True
        error = difference_of(workers)
        self._end.finish(EXIT_ENVIRONMENT, error.problem, error.remedy)
        return False

    def _wait(self, have: int, now: float) -> None:
        """Wait for more workers, and say so; after the elastic timeout, save with those that are there."""
        if self._worlds.state is not State.WAITING:
            self._worlds.state = State.WAITING
            self._wait_until, self._say_at = now + self._limits.elastic_timeout, now
        if now >= self._wait_until:
            if not self._worlds.has_begun:
                return self._end.finish_unstarted(have)
            self._end.save_for_lack(have)
            return self._regroup(now)
        if now >= self._say_at:
            least, left = self._limits.least, self._wait_until - now
            self._roster.do(Say(f"waiting for workers: {have} of at least {least}, for {left:.0f} s more"))
            self._say_at = now + WAIT_SECONDS
        return None

    def _dismiss(self, worker: Worker, now: float) -> None:
        worker.stage, worker.end_by = Stage.GOING, now + LEFT_SECONDS
        worker.reason = worker.wants_out
        self._roster.send(worker, Leave(why=worker.wants_out))
