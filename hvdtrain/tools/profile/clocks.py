"""One clock for all workers: how far each host's clock is from that of rank 0's host."""

import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.workers.agreement import Workers

_ROUNDS = 24
_CLOSE_NS = 500_000
_MOST_NS = 5_000_000_000
_LATE_SECONDS = (0.002, 0.006)  # a few of Horovod's cycles, at another place in a cycle each time
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Round = tuple[int, int]  # when a worker entered and left a barrier, by its own clock


class ClockOffset(NamedTuple):
    """How far a worker's clock is from that of rank 0.

    Attributes:
        offset_ns: what is taken off this worker's times.
        uncertainty_ns: how far from the truth that is at most.
        at_ns: when it was measured, by this worker's clock.
    """

    offset_ns: int = 0
    uncertainty_ns: int = 0
    at_ns: int = 0


def clock_id() -> str:
    """Return what tells this host's clock from others; containers of one host share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def measure_offset(workers: Workers, clock: str, now_ns: Callable[[], int] = time.time_ns) -> ClockOffset:
    """Collective. Return how far this worker's clock is from that of rank 0.

    Nobody leaves a barrier before all have entered it. So what a worker's clock says when it leaves is later
    than what rank 0's said when it entered, and the other way round: each round bounds the difference from
    both sides. The bounds are close if one of the two comes late, because the others then leave soon after;
    rank 0 and the other ranks take turns in that. If cores are busy, more rounds follow, for some seconds.

    Args:
        workers: the workers.
        clock: what tells this worker's clock from others, as ``clock_id`` returns it.
        now_ns: returns this worker's time.
    """
    clocks = workers.allgather_object(clock)
    if len(set(clocks)) == 1:
        return ClockOffset(at_ns=now_ns())
    own: list[Round] = []
    while True:
        own += _rounds(workers, now_ns)
        gathered = [[(int(a), int(b)) for a, b in found] for found in workers.allgather_object(own)]
        offsets = {
            name: ClockOffset()
            if name == clocks[0]
            else offset_of(
                gathered[0], [found for of, found in zip(clocks, gathered, strict=True) if of == name]
            )
            for name in set(clocks)
        }
        # the same on all workers: it follows from what all of them have
        is_close = max(found.uncertainty_ns for found in offsets.values()) <= _CLOSE_NS
        if is_close or gathered[0][-1][1] - gathered[0][0][0] > _MOST_NS:
            return offsets[clock]._replace(at_ns=own[-1][1])


def _rounds(workers: Workers, now_ns: Callable[[], int]) -> Iterator[Round]:
    """Collective. Yield when this worker entered and left some barriers."""
    for number in range(_ROUNDS):
        if (workers.rank == 0) == (number % 2 == 0):
            time.sleep(random.Random(number).uniform(*_LATE_SECONDS))
        entered = now_ns()
        workers.barrier()
        yield entered, now_ns()


def offset_of(root: Sequence[Round], others: Sequence[Sequence[Round]]) -> ClockOffset:
    """Return how far a clock is from that of rank 0.

    Args:
        root: the rounds of rank 0.
        others: those of each worker with the other clock.
    """
    pairs = [pair for found in others for pair in zip(root, found, strict=True)]
    most = min(left - root_entered for (root_entered, _), (_, left) in pairs)
    least = max(entered - root_left for (_, root_left), (entered, _) in pairs)
    return ClockOffset((most + least) // 2, abs(most - least) // 2)


def to_common(at_ns: int, before: ClockOffset, after: ClockOffset) -> int:
    """Return a worker's time by the clock of rank 0.

    Args:
        at_ns: the time by the worker's clock.
        before: what was measured before the recording.
        after: what was measured after it; between the two, the offset is taken to change evenly.
    """
    length = after.at_ns - before.at_ns
    if length <= 0 or before.offset_ns == after.offset_ns:
        return at_ns - before.offset_ns
    part = min(1.0, max(0.0, (at_ns - before.at_ns) / length))
    return at_ns - before.offset_ns - round(part * (after.offset_ns - before.offset_ns))
