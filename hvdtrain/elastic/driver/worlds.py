"""The current world of an elastic job: from its opening until all its workers wait for the next one."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvdtrain.elastic.driver.records import CloseStore, OpenWorld, Say
from hvdtrain.elastic.driver.roster import IN_WORLD, Roster, Stage, Worker
from hvdtrain.elastic.messages import Abort, ChangeWorld
from hvdtrain.elastic.watch.liveness import LONG_FACTOR, LONG_SECONDS, Liveness, Silent, WorkerState
from hvdtrain.storage.text import counted
from hvdtrain.workers.world import Change, MemberInfo, Purpose, Source, TrainingPosition, World


@dataclass
class _Past:
    """A world of the past, and since when and why nobody trains in it."""

    members: list[tuple[Worker, str]] = field(default_factory=list)  # with rank and host as they were then
    ended: float | None = None
    why: str = ""

    @classmethod
    def of(cls, members: Sequence[Worker]) -> "_Past":
        """Return a world of these members, which has not ended."""
        return cls([(one, f"rank {one.rank} on {one.slot.host}") for one in members])

    def seconds(self, now: float) -> float:
        """Return since how many seconds nobody trains."""
        return 0.0 if self.ended is None else now - self.ended

    def difference(self, members: Collection[Worker]) -> tuple[list[str], list[str]]:
        """Return who left, with the reason, and who came."""
        gone = [(one, name) for one, name in self.members if one not in members]
        known = [one for one, _ in self.members]
        left = [f"{name}: {one.reason or one.wants_out or 'has ended'}" for one, name in gone]
        return left, [str(one.slot) for one in members if one not in known]


class ChangeLog:
    """Who left and who came since the last world that trained, and since when nobody trains.

    Rank 0 of a world records its change as soon as it has the state. If the world breaks before all have it,
    the next one's change holds only what was not recorded.
    """

    def __init__(self) -> None:
        self._trained = self._recorded = _Past()  # the last that trained, and the last that rank 0 recorded

    def begin(self, why: str, now: float) -> None:
        """Take note that the current world ends; a change that has begun keeps its reason."""
        for past in (self._trained, self._recorded):
            if past.members and past.ended is None:
                past.ended, past.why = now, why

    def is_new(self, worker: Worker) -> bool:
        """Return whether a worker was not in the last world that trained."""
        return all(one is not worker for one, _ in self._trained.members)

    def describe(self, members: Collection[Worker], now: float) -> Change | None:
        """Return what changes with these members since rank 0 last recorded it; None before any training."""
        if not self._trained.members:
            return None
        left, joined = self._recorded.difference(members)
        why, seconds = self._recorded.why, round(self._recorded.seconds(now), 3)
        return Change(left=tuple(left), joined=tuple(joined), why=why, since_seconds=seconds)

    def say(self, members: Collection[Worker], now: float) -> str:
        """Return how long nobody trained, and who left and came since, to be added to a sentence."""
        past = self._trained
        if not past.members:
            return ""
        left, joined = past.difference(members)
        parts = [f"left: {'; '.join(left)}"] if left else []
        parts += [f"joined: {', '.join(joined)}"] if joined else []
        parts += [f"cause: {past.why}"] if not parts and past.why else []
        return f" after {past.seconds(now):.1f} s" + "".join(f"; {part}" for part in parts)

    def record(self, members: Sequence[Worker]) -> None:
        """Take note that rank 0 of a world of these members records its change."""
        if self._trained.members:
            self._recorded = _Past.of(members)

    def settle(self, members: Sequence[Worker]) -> None:
        """Take note that a world trains."""
        self._trained, self._recorded = _Past.of(members), _Past.of(members)


FORM_SECONDS = 20.0
FORM_SECONDS_A_PAIR = 0.005  # of workers: each reads from the store every other one
SYNC_SECONDS = 60.0  # without an answer or progress, and at least the stall timeout


class State(Enum):
    """What an elastic job is at."""

    STARTING = "starting"  # its first workers start and build
    FORMING = "forming"  # a world was opened; its workers start Horovod
    SYNCING = "syncing"  # they receive the state
    TRAINING = "training"
    CHANGING = "changing"  # they leave the world
    WAITING = "waiting"  # there are fewer workers than the job needs
    STOPPING = "stopping"  # they save and stop, or training is complete
    ENDED = "ended"


SAME_STEP, SAME_STEP_LOST = 3, 10  # crashes, and losses of any kind, without a step that end the job
UP = (State.FORMING, State.SYNCING, State.TRAINING, State.STOPPING)


class Worlds:
    """The current world, and what its workers are notified of it."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.state = State.STARTING  # what the job is at
        self.generation = 0  # the number of the current world; 0 before the first
        self.has_begun = False  # whether any worker ever had the state of a world
        self.broken = 0  # number of worlds that broke
        self.same_failures = 0  # in a row, with the same workers and without a step
        self.unentered = 0  # worlds in a row that the same workers could not enter
        self.was_up, self.why_broken = False, ""  # whether the last world that broke had trained, and why
        self.stalled = ""  # why no worker made progress, if that broke the world
        self.log = ChangeLog()
        self._broke_at: list[tuple[int, Hashable]] = []  # worlds, and where their survivors stood
        self._lost_in: dict[int, bool] = {}  # worlds that lost a worker, and whether one crashed
        self._names: set[str] = set()
        self._unentered_by: set[str] = set()
        self._deadline = self._left_since = float("inf")
        self._moved = 0.0  # when a worker that receives the state last made progress
        self._is_broken = False
        self._place = TrainingPosition()  # where the last world began
        self._where: Hashable = None  # the same, with the kind of its source
        self._run_dir = ""  # of the job, as workers that trained have said
        self._liveness: Liveness | None = None

    @property
    def members(self) -> list[Worker]:
        """The workers that are in the current world, or still leave it."""
        return self._roster.at(*IN_WORLD)

    def open(
        self, workers: Sequence[Worker], source: Source, purpose: Purpose, now: float, *, why: str = ""
    ) -> None:
        """Let workers enter the next world, in the order of ranks."""
        change = self.log.describe(workers, now)
        members = tuple(
            MemberInfo(
                worker=one.name,
                rank=rank,
                host=one.slot.host,
                pid=one.hello.pid if one.hello else 0,
                place=one.place,
                is_new=self.log.is_new(one),
            )
            for rank, one in enumerate(workers)
        )
        where = members[0].place if source == "root" else ("checkpoint", self._place)
        names = {worker.name for worker in workers}
        if self._is_broken:
            self._broke_at = [*self._broke_at, (self.generation, where)][-SAME_STEP_LOST:]
        is_same = self._is_broken and (names, where) == (self._names, self._where)
        self.same_failures = self.same_failures + 1 if is_same else 0
        self._names, self._where, self._liveness = names, where, None
        self.generation += 1
        for rank, worker in enumerate(workers):
            worker.generation, worker.rank = self.generation, rank
            worker.stage, worker.since = Stage.ENTERING, now
        self.state, self._is_broken, self.stalled = State.FORMING, False, ""
        self._deadline = now + FORM_SECONDS + len(workers) ** 2 * FORM_SECONDS_A_PAIR
        hosts = [worker.slot.host for worker in workers]
        machines = {(one.slot.host, one.hello.machine) for one in workers if one.hello}
        worlds = []
        for rank, host in enumerate(hosts):
            local_rank = hosts[:rank].count(host)
            peers = [one for one in dict.fromkeys(hosts) if hosts.count(one) > local_rank]
            worlds.append(
                World(
                    generation=self.generation,
                    rank=rank,
                    size=len(workers),
                    local_rank=local_rank,
                    local_size=hosts.count(host),
                    cross_rank=peers.index(host),
                    cross_size=len(peers),
                    host=host,
                    store=("", 0),
                    one_host=len(machines) == 1,
                    salt="",
                    source=source,
                    purpose=purpose,
                    why=why,
                    members=members,
                    change=change,
                    run_dir=self._run_dir,
                )
            )
        self._roster.do(OpenWorld(tuple(worlds)))

    def lost(self, generation: int, *, crashed: bool) -> None:
        """Take note that a world lost a worker; that it crashed may be known only after the next began."""
        self._lost_in[generation] = crashed or self._lost_in.get(generation, False)

    def breaks_again(self, count: int, *, crashed: bool) -> bool:
        """Return whether the last worlds, so many, all lost a worker at one place, by a crash or any way."""
        last = self._broke_at[-count:]
        kinds = (True,) if crashed else (True, False)
        return (
            len(last) == count
            and len({where for _, where in last}) == 1
            and all(self._lost_in.get(generation) in kinds for generation, _ in last)
        )

    def formed(self, worker: Worker, now: float) -> None:
        """Take note that Horovod is up on a worker."""
        if worker.stage is Stage.ENTERING:
            worker.stage = Stage.SYNCING
        self._advance(now)

    def synced(self, worker: Worker, place: TrainingPosition, run_dir: str, now: float) -> None:
        """Take note that a worker has the state of the world, which is written to a run directory."""
        self._run_dir = run_dir or self._run_dir
        if worker.stage in (Stage.ENTERING, Stage.SYNCING):
            worker.stage, self.has_begun, self._place = Stage.TRAINING, True, place
            self._moved = now
            if worker.rank == 0:
                self.log.record(self.members)
        self._advance(now)

    def _advance(self, now: float) -> None:
        stages = {worker.stage for worker in self.members}
        if self.state is State.FORMING and Stage.ENTERING not in stages:
            self._roster.do(CloseStore())
            self.state = State.SYNCING
            self._moved = now
        if self.state is State.SYNCING and stages == {Stage.TRAINING}:
            self.state, self._deadline, self.unentered = State.TRAINING, float("inf"), 0
            members = sorted(self.members, key=lambda worker: worker.rank)
            self._liveness = Liveness(
                None, [worker.member() for worker in members], self._roster.stall_timeout(), now
            )
            for worker in members:
                if worker.state:
                    self._liveness.beat(worker.rank, worker.state._replace(age_seconds=0.0), now)
            training = f"training with {counted(len(members), 'worker')} (world {self.generation})"
            self._roster.do(Say(training + self.log.say(members, now)))
            self.log.settle(members)

    def beat(self, worker: Worker, state: WorkerState, now: float) -> None:
        """Take note of what a worker does."""
        before, worker.state = worker.state, state
        if before is None or (before.number, before.place) != (state.number, state.place):
            self._moved = now
        if self._liveness is not None and worker.stage is Stage.TRAINING:
            self._liveness.beat(worker.rank, state, now)

    def change(self, why: str, now: float) -> None:
        """Let all workers leave the world at the next step boundary."""
        self.log.begin(why, now)
        self.state, self._left_since, self._is_broken = State.CHANGING, float("inf"), False
        for worker in self.members:
            self._roster.send(worker, ChangeWorld(generation=self.generation, why=why))

    def left(self, worker: Worker, now: float) -> None:
        """Take note that a worker has left the world and waits for the next one, or is gone."""
        if self._liveness is not None:
            self._liveness.drop(worker.rank)
        if self.state is State.CHANGING:
            self._left_since = min(self._left_since, now)

    def break_up(self, why: str, now: float) -> None:
        """Let all workers give up the world at once: one of them was lost."""
        if self.state not in (*UP, State.CHANGING) or self._is_broken:
            return
        self.log.begin(why, now)
        if self.state is State.FORMING:
            self._roster.do(CloseStore())
        self.state, self._left_since, self._is_broken = State.CHANGING, now, True
        self.broken += 1
        self.was_up, self.why_broken = self._liveness is not None, why
        if not self.was_up:
            self.unentered = self.unentered + 1 if self._names == self._unentered_by else 1
            self._unentered_by = self._names
        for worker in self.members:
            again = worker.stage is Stage.ENTERING
            self._roster.send(worker, Abort(generation=self.generation, why=why, again=again))

    def judge(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that must be given up now, with the reason; the world may break."""
        if self.state in (State.FORMING, State.SYNCING):
            return self._late(now)
        if self.state is State.CHANGING and self._left_since < float("inf"):
            return self._unanswering(now)
        if self._liveness is None or self.state not in (State.TRAINING, State.STOPPING, State.CHANGING):
            return []
        is_alone = len(self.members) < 2
        event = self._liveness.judge_silence(now) if is_alone else self._liveness.judge(None, now)
        if event is None:
            return []
        if not event.ranks:
            self.break_up(event.problem, now)
            self.stalled = event.problem
            return []
        blamed = [worker for worker in self.members if worker.rank in event.ranks]
        no_progress = "" if isinstance(event, Silent) else f"makes no progress: {event.problem}"
        return [(worker, no_progress or worker.silence(now)) for worker in blamed]

    def _late(self, now: float) -> list[tuple[Worker, str]]:
        """Return the silent workers of a world that does not come up in time; the others try again."""
        if self.state is State.FORMING:
            doing, is_late = "enter the world", now >= self._deadline
        else:  # sending the state may take any time with progress
            limit = max(SYNC_SECONDS, self._roster.stall_timeout())
            is_frozen = any(now - worker.heard >= limit for worker in self.members)
            doing, is_late = "receive the state", is_frozen or now - self._moved >= LONG_FACTOR * limit
        if not is_late:
            return []
        silent = [worker for worker in self.members if worker.is_silent(now)]
        self.break_up(f"the workers did not {doing} in time", now)
        return [(worker, f"did not {doing} in time, and does not answer") for worker in silent]

    def _unanswering(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that have not left the world in time."""
        stall = self._roster.stall_timeout() or LONG_SECONDS
        lost = []
        for worker in self.members:
            is_long = worker.state is not None and worker.state.is_long and not worker.is_silent(now)
            limit = max(LONG_FACTOR * stall, LONG_SECONDS) if is_long else stall
            if now - self._left_since >= limit:
                lost.append((worker, f"did not leave the world within {limit:.0f} s{worker.doing}"))
        return lost
