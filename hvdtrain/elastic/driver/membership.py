"""Who belongs to an elastic job: what happens goes in, what to do about it comes out.

``Members`` takes events with the time and returns actions. It has no connection, process, clock or
randomness, so that every order of events can be tested. It knows each worker (``roster.py``), which slots get
one (``regrouping.py``) and the current world (``worlds.py``), and decides on the next one
and on the end of the job (``job_end.py``).
"""

from typing import Any

from hvdtrain.elastic import messages
from hvdtrain.elastic.driver import records
from hvdtrain.elastic.driver.job_end import LEFT_SECONDS, SAVE_SECONDS, JobEnd
from hvdtrain.elastic.driver.regrouping import Regrouping, difference_of
from hvdtrain.elastic.driver.roster import ALIVE, IN_WORLD, Roster, Staffing, Stage, Worker
from hvdtrain.elastic.driver.worlds import UP, State, Worlds
from hvdtrain.elastic.watch.liveness import read_state
from hvdtrain.errors import EXIT_ENVIRONMENT

_NO_WORD = "ended without a message"
_ENDS_SECONDS = 10.0  # for a worker that said that it fails


class Members:
    """The state of an elastic job as its driver sees it."""

    def __init__(self, limits: records.Limits, now: float, *, job: str = "job", command: str = "") -> None:
        self._limits, self._job = limits, job
        self._now, self._slept = now, 0.0
        self._roster = Roster(limits)
        self._staffing, self._worlds = Staffing(self._roster), Worlds(self._roster)
        self._end = JobEnd(self._roster, self._worlds, command)
        self._regrouping = Regrouping(self._roster, self._worlds, self._end, now)

    @property
    def state(self) -> State:
        """What the job is at."""
        return self._worlds.state

    @property
    def generation(self) -> int:
        """The number of the current world; 0 before the first."""
        return self._worlds.generation

    def take(self, event: records.Event, now: float) -> list[records.Action]:
        """Take an event, and return what is to be done, in this order."""
        if isinstance(event, records.Tick):
            self._slept += event.slept_seconds
        # never back, and without the time in which the driver itself did not run
        self._now = max(self._now, now - self._slept)
        if self.state is not State.ENDED:
            self._take(event, self._now)
        if self.state is not State.ENDED:
            self._go_on(self._now)
        actions, self._roster.actions = self._roster.actions, []
        return actions

    def admits(self, worker: str) -> bool:
        """Return whether a worker of this name is expected to connect."""
        found = self._roster.find(worker)
        return found is not None and found.stage is Stage.STARTED and self.state is not State.ENDED

    def hears(self, worker: str) -> bool:
        """Return whether a worker is to get beats: a lost one must not renew its lease, nor a silent one."""
        found = self._roster.find(worker)
        return found is not None and found.stage is not Stage.LOST and not found.is_silent(self._now)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the workers that are there, for whoever watches the job from outside."""
        return [
            {
                "worker": one.name,
                "host": one.slot.host,
                "slot": one.slot.number,
                "pid": one.hello.pid if one.hello else None,
                "stage": one.stage.value,
                "generation": one.generation,
                "rank": one.rank if one.stage in IN_WORLD else None,
            }
            for one in self._roster.at(*ALIVE, Stage.GOING)
        ]

    def _take(self, event: records.Event, now: float) -> None:
        match event, self._roster.find(getattr(event, "worker", "")):
            case records.Discovered(hosts), _:
                self._staffing.discover(hosts, now)
            case records.Signalled(number), _:
                self._end.stop(number, now)
            case records.StoreFailed(reason), _:
                self._end.finish(EXIT_ENVIRONMENT, f"no world could be opened: {reason}")
            case records.Arrived(_, hello), Worker() as worker if worker.stage is Stage.STARTED:
                self._arrived(worker, hello, now)
            case records.Heard(_, message), Worker() as worker:
                worker.heard = now
                self._heard(worker, message, now)
            case records.Lost(_, is_unreachable), Worker() as worker:
                worker.is_connected, worker.is_unreachable = False, is_unreachable
                self._gone(worker, "its host does not answer" if is_unreachable else _NO_WORD, now)
            case records.Exited(_, code), Worker() as worker:
                worker.exit_code = code
                if worker.reason in ("", _NO_WORD) and worker.stage is not Stage.GOING:
                    worker.reason = worker.ending
                if worker.failed_in and worker.is_crash:
                    self._worlds.lost(worker.failed_in, crashed=True)
                self._gone(worker, worker.ending, now)

    def _arrived(self, worker: Worker, hello: messages.Hello, now: float) -> None:
        worker.hello, worker.stage, worker.since, worker.heard = hello, Stage.BUILDING, now, now
        worker.is_connected = True
        welcome = messages.Welcome(
            worker=worker.name,
            job=self._job,
            slot=worker.slot.number,
            slots_on_host=max(worker.slot.number + 1, self._staffing.slots_on(worker.slot.host)),
            least=self._limits.least,
            most=self._limits.most,
            is_training=self._worlds.has_begun,
            lease_seconds=self._limits.silence_seconds,
        )
        self._roster.send(worker, welcome)

    def _heard(self, worker: Worker, message: messages.FromWorker, now: float) -> None:
        if getattr(message, "generation", worker.generation) != worker.generation:
            return  # it crossed with a newer world
        is_entering = worker.generation == self.generation and worker.stage is Stage.ENTERING
        match message:
            case messages.Ready():
                self._ready(worker, message, now)
            case messages.LeftWorld():
                self._left(worker, now)
            case messages.Failed():
                self._failed(worker, message, now)
            case messages.Done(exit_code=code):
                worker.is_out, worker.stage, worker.end_by = True, Stage.GOING, now + 2 * LEFT_SECONDS
                self._worlds.left(worker, now)
                self._end.done(code, now)
            case messages.Formed():
                self._worlds.formed(worker, now)
            case messages.FormFailed(reason=reason) if is_entering:
                self._worlds.break_up(f"{worker} could not enter the world: {reason}", now)
            case messages.Synced(place=place, run_dir=run_dir):
                self._worlds.synced(worker, place, run_dir, now)
            case messages.Beat(state=values) if state := read_state(values):
                self._worlds.beat(worker, state, now)
            case messages.Leaving(why=why) if worker.stage in (Stage.BUILDING, Stage.READY, *IN_WORLD):
                worker.wish = why or "it was requested to leave"

    def _ready(self, worker: Worker, message: messages.Ready, now: float) -> None:
        if worker.stage not in (Stage.BUILDING, Stage.READY, *IN_WORLD):
            return
        was_member = worker.stage in IN_WORLD
        worker.ready, worker.stage, worker.values = message, Stage.READY, message.values or worker.values
        worker.since = now if was_member or not worker.since else worker.since
        if was_member:
            self._worlds.left(worker, now)
            if not self._end.completed(worker, now) and self.state in UP:
                self._worlds.break_up(f"{worker} lost its connection to the others", now)
        elif self._regrouping.digest and message.digest != self._regrouping.digest:
            # a joiner that differs is refused, and the others are not notified
            worker.stage, worker.end_by = Stage.GOING, now + LEFT_SECONDS
            members = sorted(self._worlds.members or self._roster.at(Stage.READY), key=lambda one: one.rank)
            error = difference_of([*members[:1], worker])
            worker.reason, worker.failed_in = f"was refused: {error.problem}", worker.generation
            self._roster.send(worker, messages.Refuse(problem=error.problem, remedy=error.remedy))

    def _left(self, worker: Worker, now: float) -> None:
        was_member = worker.stage in IN_WORLD
        worker.is_out = True
        worker.reason = worker.reason or worker.wants_out or "left"
        if worker.stage is not Stage.LOST:
            worker.stage, worker.end_by = Stage.GOING, now + LEFT_SECONDS
            self._staffing.left(worker, now)
        if was_member:
            self._worlds.left(worker, now)
            if self.state in UP and not self._end.is_complete:
                self._worlds.break_up(f"{worker} left", now)

    def _failed(self, worker: Worker, message: messages.Failed, now: float) -> None:
        if worker.stage in (Stage.LOST, Stage.GOING):
            return
        worker.failure, worker.reason = message, f"failed: {message.problem}"
        problem, remedy, code = message.problem, message.remedy, message.exit_code
        speak = messages.End(problem=problem, remedy=remedy, exit_code=code, speaks=True)
        self._roster.send(worker, speak)
        is_of_all = worker.generation > 0 or not self._worlds.has_begun
        if message.blame == "code" and is_of_all:
            worker.stage, worker.end_by = Stage.GOING, now + _ENDS_SECONDS
            self._end.finish(code, reported=problem, remedy=remedy, grace_seconds=SAVE_SECONDS)
        else:
            self._lose(worker, worker.reason, now, kill_after=_ENDS_SECONDS)

    def _gone(self, worker: Worker, reason: str, now: float) -> None:
        """Take note that a worker's process or its connection has ended."""
        if worker.stage in ALIVE:
            self._lose(worker, reason, now)
        elif worker.stage is Stage.GOING:
            self._roster.lose(worker, reason, now)
            self._roster.kill(worker)

    def _lose(self, worker: Worker, reason: str, now: float, kill_after: float = 0.0) -> None:
        """Let the job continue without a worker that failed, and end its process."""
        was_member = worker.stage in IN_WORLD
        self._roster.lose(worker, reason, now)
        worker.failed_in = worker.generation
        if kill_after:
            worker.end_by = now + kill_after
        else:
            self._roster.kill(worker)
        if was_member:
            self._worlds.left(worker, now)
            if not self._end.is_complete:
                self._worlds.break_up(f"{worker} {worker.reason}", now)
            self._worlds.lost(worker.generation, crashed=worker.is_crash)

    def _go_on(self, now: float) -> None:
        """Do what is due, and what has become possible."""
        for worker, reason in [*self._worlds.judge(now), *self._regrouping.late(now)]:
            if worker.stage in ALIVE:
                self._lose(worker, reason, now)
        for worker in self._roster.at(Stage.LOST, Stage.GOING):
            if worker.end_by <= now:
                if worker.stage is Stage.GOING:
                    self._roster.lose(worker, "did not end in time", now)
                worker.end_by = float("inf")
                self._roster.kill(worker)
        self._count_failures(now)
        self._roster.clean(now)
        begun = self._worlds.has_begun
        if self._staffing.is_hopeless and not begun and not self._roster.at(Stage.READY):
            self._end.finish_hopeless()
        if self.state is not State.ENDED:
            self._regrouping.advance(now)
        if not self._end.is_ending:
            self._staffing.hire(self._limits.most if begun else self._limits.wanted, now)

    def _count_failures(self, now: float) -> None:
        """Take note of failures, once their reason is known or will not be."""
        for worker in self._roster.at(Stage.LOST):
            is_known = worker.exit_code is not None or now >= worker.settled_by
            if worker.failed_in is not None and is_known and not worker.is_counted:
                worker.is_counted = True
                self._end.last_failure = worker
                self._staffing.failed(worker, self._worlds.has_begun, now)
