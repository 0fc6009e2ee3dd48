"""The current world of an elastic job: from its opening until all its workers wait for the next one."""

from collections.abc import Callable, Collection, Hashable, Sequence
from enum import Enum

from hvdtrain.elastic.driver.records import Action, CloseStore, OpenWorld, Say, Send
from hvdtrain.elastic.driver.roster import IN_WORLD, Roster, Stage, Worker
from hvdtrain.elastic.messages import Abort, ChangeWorld
from hvdtrain.elastic.watch.liveness import (
    LONG_FACTOR,
    LONG_SECONDS,
    Liveness,
    Silent,
    WatchEvent,
    WorkerState,
)
from hvdtrain.storage.text import counted
from hvdtrain.workers.world import Change, MemberInfo, Purpose, Source, TrainingPosition, World


class ChangeLog:
    """Who left and who came since the last world that trained, and since when nobody trains.

    Rank 0 of a world records its change as soon as it has the state. If the world breaks before all have it,
    the next one's change holds only what was not recorded.
    """

    def __init__(self) -> None:
        self._trained: list[tuple[Worker, str]] = []  # with rank and host as they were then
        self._recorded: list[tuple[Worker, str]] = []  # the members when rank 0 last recorded a change
        self._began: float | None = None
        self._unrecorded_since: float | None = None
        self._why = self._cause = ""  # why the last world that trained ended

    def begin(self, why: str, now: float) -> None:
        """Take note that the current world ends; a change that has begun keeps its reason."""
        if not self._trained:
            return
        if self._began is None:
            self._began, self._cause = now, why
        if self._unrecorded_since is None:
            self._unrecorded_since, self._why = now, why

    def is_new(self, worker: Worker) -> bool:
        """Return whether a worker was not in the last world that trained."""
        return all(one is not worker for one, _ in self._trained)

    def describe(self, members: Collection[Worker], now: float) -> Change | None:
        """Return what changes with these members since rank 0 last recorded it; None before any training."""
        if not self._trained:
            return None
        since = now if self._unrecorded_since is None else self._unrecorded_since
        left, joined = _difference(self._recorded, members)
        why, seconds = self._why, round(now - since, 3)
        return Change(left=tuple(left), joined=tuple(joined), why=why, since_seconds=seconds)

    def say(self, members: Collection[Worker], now: float) -> str:
        """Return how long nobody trained, and who left and came since, to be added to a sentence."""
        if not self._trained:
            return ""
        left, joined = _difference(self._trained, members)
        parts = [f"left: {'; '.join(left)}"] if left else []
        parts += [f"joined: {', '.join(joined)}"] if joined else []
        parts += [f"cause: {self._cause}"] if not parts and self._cause else []
        paused = 0.0 if self._began is None else now - self._began
        return f" after {paused:.1f} s" + "".join(f"; {part}" for part in parts)

    def record(self, members: Sequence[Worker]) -> None:
        """Take note that rank 0 of a world of these members records its change."""
        if self._trained:
            self._recorded = _named(members)
            self._unrecorded_since, self._why = None, ""

    def settle(self, members: Sequence[Worker]) -> None:
        """Take note that a world trains."""
        self._trained = self._recorded = _named(members)
        self._began = self._unrecorded_since = None
        self._why = self._cause = ""


def _named(members: Sequence[Worker]) -> list[tuple[Worker, str]]:
    return [(one, f"rank {one.rank} on {one.slot.host}") for one in members]


def _difference(
    before: Sequence[tuple[Worker, str]], members: Collection[Worker]
) -> tuple[list[str], list[str]]:
    """Return who left, with the reason, and who came."""
    gone = [(one, name) for one, name in before if one not in members]
    known = [one for one, _ in before]
    left = [f"{name}: {one.reason or one.wants_out or 'has ended'}" for one, name in gone]
    return left, [str(one.slot) for one in members if one not in known]


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

    def __init__(self, roster: Roster, do: Callable[[Action], None]) -> None:
        self._roster, self._do = roster, do
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
        members = tuple(self._member(rank, one) for rank, one in enumerate(workers))
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
        self._do(OpenWorld(tuple(worlds)))

    def _member(self, rank: int, one: Worker) -> MemberInfo:
        assert one.hello is not None  # it is ready
        assert one.ready is not None
        host, place, is_new = one.slot.host, one.ready.place, self.log.is_new(one)
        return MemberInfo(
            worker=one.name, rank=rank, host=host, pid=one.hello.pid, place=place, is_new=is_new
        )

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
            self._do(CloseStore())
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
            self._do(Say(training + self.log.say(members, now)))
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
            self._do(Send(worker.name, ChangeWorld(generation=self.generation, why=why)))

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
            self._do(CloseStore())
        self.state, self._left_since, self._is_broken = State.CHANGING, now, True
        self.broken += 1
        self.was_up, self.why_broken = self._liveness is not None, why
        if not self.was_up:
            self.unentered = self.unentered + 1 if self._names == self._unentered_by else 1
            self._unentered_by = self._names
        for worker in self.members:
            again = worker.stage is Stage.ENTERING
            self._do(Send(worker.name, Abort(generation=self.generation, why=why, again=again)))

    def judge(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that must be given up now, with the reason; the world may break."""
        if self.state in (State.FORMING, State.SYNCING):
            return self._late(now)
        if self.state is State.CHANGING and self._left_since < float("inf"):
            return self._unanswering(now)
        event = self._noticed(now)
        if event is None:
            return []
        if not event.ranks:
            self.break_up(event.problem, now)
            self.stalled = event.problem
            return []
        blamed = [worker for worker in self.members if worker.rank in event.ranks]
        if isinstance(event, Silent):
            return [(worker, _describe_silence(worker, now)) for worker in blamed]
        return [(worker, f"makes no progress: {event.problem}") for worker in blamed]

    def _noticed(self, now: float) -> WatchEvent | None:
        """Return who does not answer, or makes no progress, in a world that trains."""
        if self.state not in (State.TRAINING, State.STOPPING, State.CHANGING) or self._liveness is None:
            return None
        is_alone = len(self.members) < 2
        return self._liveness.judge_silence(now) if is_alone else self._liveness.judge(None, now)

    def _is_late(self, now: float) -> bool:
        """Return whether the world does not come up; sending the state may take any time with progress."""
        if self.state is State.FORMING:
            return now >= self._deadline
        limit = max(SYNC_SECONDS, self._roster.stall_timeout())
        is_frozen = any(now - worker.heard >= limit for worker in self.members)
        is_stuck = now - self._moved >= LONG_FACTOR * limit
        return is_frozen or is_stuck

    def _late(self, now: float) -> list[tuple[Worker, str]]:
        """Return the silent workers of a world that does not come up in time; the others try again."""
        if not self._is_late(now):
            return []
        doing = "enter the world" if self.state is State.FORMING else "receive the state"
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


def _describe_silence(worker: Worker, now: float) -> str:
    last = f"; last it was {worker.state}" if worker.state else ""
    return f"has not answered for {now - worker.heard:.0f} s: stopped or starved{last}"
