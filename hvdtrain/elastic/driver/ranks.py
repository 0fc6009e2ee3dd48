"""Which rank each worker has in the next world."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvdtrain.workers.world import Change, MemberInfo, Place, Purpose, Source, World

_START = Place()


@dataclass(frozen=True)
class Candidate:
    """A worker that waits for the next world.

    Attributes:
        worker: its name.
        host: the name of its host.
        machine: what tells its host from others of the same name.
        pid: its process.
        place: where it stands.
        is_valid: whether its state is whole, so that the others may get theirs from it.
        old_rank: its rank in the world before; None if it was in none.
        is_new: whether it was not among those that trained last.
    """

    worker: str
    host: str
    machine: str = ""
    pid: int = 0
    place: Place = _START
    is_valid: bool = False
    old_rank: int | None = None
    is_new: bool = True


def choose_source(candidates: Collection[Candidate], has_begun: bool) -> Source:
    """Return where the state of the next world comes from.

    Args:
        candidates: its workers.
        has_begun: whether any worker ever had the state of a world.
    """
    if any(one.is_valid for one in candidates):
        return "root"
    return "checkpoint" if has_begun else "start"


def arrange(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return the workers of the next world in the order of ranks.

    Rank 0 is the valid worker with the largest place, the old rank 0 among equals; without a valid worker
    the old rank 0, or the one that waits longest. Its host comes first, and the workers of a host are
    neighbours. Otherwise the old order is kept, and who is new comes last.

    Args:
        candidates: the workers, those that wait longest first.
        most: more are left out, the newest first.
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
    """Return the world as each of its workers is told of it, without store and salt.

    Args:
        arranged: the workers in the order of ranks.
        generation: the number of the world.
        source: where its state comes from.
        purpose: what it is for.
        change: why it takes the place of the one before.
        why: why it does not train; empty if it does.
        run_dir: the run directory of the job, if that is known.
    """
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
