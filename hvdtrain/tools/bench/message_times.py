"""How long sums over the workers take, against their size: through Horovod, and without it."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.bench.alone import bench_module
from hvdtrain.bench.raw import Raw, raw_calls
from hvdtrain.tools.bench.spread import Spread
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers

KIB, MIB = 2**10, 2**20
LEAST_BYTES, MOST_BYTES = 4 * KIB, 128 * MIB
_SIZE_SECONDS = 0.4  # for each size and way
_LEAST_REPEATS, _MOST_REPEATS = 3, 300
_WARM = 2


@dataclass(frozen=True)
class MessageTime:
    """How long the sum of a buffer over all workers takes.

    Attributes:
        size: bytes of the buffer.
        horovod: seconds through Horovod, on the slowest worker.
        raw: seconds without it; None if that is not measured.
    """

    size: int
    horovod: Spread
    raw: Spread | None

    @property
    def ratio(self) -> float | None:
        """How many times as long Horovod takes."""
        return None if self.raw is None else self.horovod.median / self.raw.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the buffer per second, through Horovod."""
        return self.size / self.horovod.median


def sizes_up_to(most: int) -> Iterator[int]:
    """Yield the sizes, in bytes: powers of four, and the largest one."""
    size = LEAST_BYTES
    while size < most:
        yield size
        size *= 4
    yield most


def measure_messages(
    workers: Workers, framework: str, *, on_gpu: bool, most_bytes: int, seconds: float
) -> tuple[list[MessageTime], str]:
    """Collective. Return how long sums take, and which call stands beside Horovod's, or why none does.

    Args:
        workers: the job's workers.
        framework: "torch" or "tf".
        on_gpu: whether the job computes on GPUs.
        most_bytes: the largest size.
        seconds: when so much time is spent, larger sizes are left out.
    """
    all_reduce_of = bench_module(framework, "allreduce").all_reduce_of
    times: list[MessageTime] = []
    with raw_calls(workers, on_gpu) as raw:
        begun = time.perf_counter()
        for size in sizes_up_to(most_bytes):
            ACTIVITY.enter(f"measuring all-reduces of {words_for_size(size)}", is_long=True)
            horovod = all_reduce_of(size, on_gpu)
            other = None if raw.of_size is None else raw.of_size(size)
            measured = _in_turn(workers, [horovod] if other is None else [horovod, other])
            times.append(MessageTime(size, measured[0], measured[1] if len(measured) > 1 else None))
            if max(workers.allgather_object(time.perf_counter() - begun)) > seconds:
                break
        return times, _words_for(raw)


def _words_for(raw: Raw) -> str:
    return raw.name or f"not compared: {raw.reason}"


def _in_turn(workers: Workers, calls: Sequence[Callable[[], None]]) -> list[Spread]:
    """Collective. Time calls in turn, so that what else the machine does hits all of them alike."""
    first: list[float] = []
    for call in calls:
        for _ in range(_WARM):
            call()
        first.append(_seconds_of(call))
    longest = max(max(of_rank) for of_rank in workers.allgather_object(first))
    repeats = min(max(round(_SIZE_SECONDS / max(longest, 1e-6)), _LEAST_REPEATS), _MOST_REPEATS)
    own: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for times, call in zip(own, calls, strict=True):
            times.append(_seconds_of(call))
    found = []
    for times in own:
        quarter = statistics.quantiles(times, n=4)
        of_ranks = workers.allgather_object([statistics.median(times), quarter[0], quarter[2]])
        found.append(Spread(*max(of_ranks)))
    return found


def _seconds_of(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def words_for_size(size: int) -> str:
    """Return a number of bytes as 4 KiB or 16 MiB."""
    return f"{size // MIB} MiB" if size >= MIB and size % MIB == 0 else f"{size / KIB:,.0f} KiB"
