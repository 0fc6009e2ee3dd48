"""Which rank each worker has in the next world."""

import signal
from collections.abc import Collection, Hashable, Sequence, Set
from dataclasses import dataclass

from hvdtrain.workers.world import Change, MemberInfo, Purpose, Source, TrainingPosition, World

SAME_STEP = 3
SAME_STEP_LOST = 10

# what ends a process from outside, so that it says nothing of the step
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SSH_FAILED, COMMAND_NOT_FOUND = 255, 127  # exit codes of ssh and of a shell
_FROM_OUTSIDE = {0, SSH_FAILED, *(-one for one in _SIGNALS), *(128 + one for one in _SIGNALS)}


def is_crash(code: int) -> bool:
    """Return whether an exit code speaks of the process itself and not of whoever ended it."""
    return code not in _FROM_OUTSIDE


def describe_exit(code: int, *, has_joined: bool = True) -> str:
    """Return an exit code as text, such as "killed (SIGKILL)"."""
    if code < 0:
        try:
            return f"killed ({signal.Signals(-code).name})"
        except ValueError:
            return f"killed (signal {-code})"
    meaning = {SSH_FAILED: ", as ssh does if it cannot log in or its connection ends"}
    if has_joined:
        meaning[0] = " in the middle of the job (sys.exit() or os._exit(0) in the task?)"
    else:
        meaning |= {0: " and did not join the job", COMMAND_NOT_FOUND: ": the command was not found"}
    return f"ended with exit code {code}{meaning.get(code, '')}"


class Crashes:
    """Counts worlds that broke one after the other, by workers that were lost, without a step between.

    A crash speaks of the process itself. A worker that is killed or freezes may be lost for reasons of its
    host, so that more of these end the job.
    """

    def __init__(self) -> None:
        self._broke_at: list[tuple[int, Hashable]] = []  # generation, and where its survivors stand
        self._crashed: set[int] = set()
        self._lost: set[int] = set()

    def lost(self, generation: int) -> None:
        """Take note that a worker of a world was lost, whatever the reason."""
        self._lost.add(generation)

    def crashed(self, generation: int) -> None:
        """Take note that a worker of a world crashed, which may be known only after the next was formed."""
        self._crashed.add(generation)

    def broke(self, generation: int, where: Hashable) -> None:
        """Take note that a world broke, and where the training continued."""
        self._broke_at = [*self._broke_at, (generation, where)][-SAME_STEP_LOST:]

    def is_repeated(self) -> bool:
        """Return whether the last worlds all broke by a crash at the same place."""
        return self._all_at_one_place(SAME_STEP, self._crashed)

    def is_lost_again(self) -> bool:
        """Return whether the last worlds, more of them, all lost a worker at the same place."""
        return self._all_at_one_place(SAME_STEP_LOST, self._lost | self._crashed)

    def _all_at_one_place(self, count: int, generations: Set[int]) -> bool:
        last = self._broke_at[-count:]
        return (
            len(last) == count
            and len({where for _, where in last}) == 1
            and all(generation in generations for generation, _ in last)
        )


_START = TrainingPosition()


@dataclass(frozen=True)
class Candidate:
    """A worker that waits for the next world."""

    worker: str  # its name
    host: str  # the name of its host
    machine: str = ""  # what distinguishes its host from others of the same name
    pid: int = 0  # its process
    place: TrainingPosition = _START  # its place in the training
    is_valid: bool = False  # whether its state is whole, so that the others may get theirs from it
    old_rank: int | None = None  # its rank in the world before; None if it was in none
    is_new: bool = True  # whether it was not among those that trained last


def choose_source(candidates: Collection[Candidate], has_begun: bool) -> Source:
    """Return where the state of the next world comes from."""
    if any(one.is_valid for one in candidates):
        return "root"
    return "checkpoint" if has_begun else "start"


def arrange(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return the workers of the next world in the order of ranks, given those that wait longest first.

    Rank 0 is the valid worker with the largest place, the old rank 0 among equals; without a valid worker
    the old rank 0, or the one that waits longest. Its host comes first, and the workers of a host are
    neighbours. Otherwise the old order is kept, and who is new comes last.
    """
    far = len(candidates) + max((one.old_rank or 0 for one in candidates), default=0)

    def age(one: Candidate) -> int:
        return far if one.old_rank is None else one.old_rank

    ordered = sorted(candidates, key=age)  # stable
    sources = [one for one in ordered if one.is_valid]
    root = max(sources, key=lambda one: one.place) if sources else ordered[0]  # the first among equals
    chosen = [root, *(one for one in ordered if one is not root)][:most]
    hosts = list(dict.fromkeys(one.host for one in chosen))
    return [one for host in hosts for one in chosen if one.host == host]


def describe_worlds(
    arranged: Sequence[Candidate],
    generation: int,
    source: Source,
    purpose: Purpose,
    change: Change | None,
    *,
    why: str = "",
    run_dir: str = "",
) -> tuple[World, ...]:
    """Return the world as each of its workers is notified of it, without store and salt."""
    members = tuple(
        MemberInfo(
            worker=one.worker, rank=rank, host=one.host, pid=one.pid, place=one.place, is_new=one.is_new
        )
        for rank, one in enumerate(arranged)
    )
    hosts = list(dict.fromkeys(one.host for one in arranged))
    sizes = {host: sum(one.host == host for one in arranged) for host in hosts}
    worlds = []
    for rank, one in enumerate(arranged):
        local_rank = sum(other.host == one.host for other in arranged[:rank])
        peers = [host for host in hosts if sizes[host] > local_rank]
        worlds.append(
            World(
                generation=generation,
                rank=rank,
                size=len(arranged),
                local_rank=local_rank,
                local_size=sizes[one.host],
                cross_rank=peers.index(one.host),
                cross_size=len(peers),
                host=one.host,
                store=("", 0),
                one_host=len({(other.host, other.machine) for other in arranged}) == 1,
                salt="",
                source=source,
                purpose=purpose,
                why=why,
                members=members,
                change=change,
                run_dir=run_dir,
            )
        )
    return tuple(worlds)
