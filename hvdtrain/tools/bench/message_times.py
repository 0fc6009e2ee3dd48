"""How long all-reduces over the workers take, against their size."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.tools.bench.spread import Spread
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers

KIB, MIB = 2**10, 2**20
LEAST_BYTES, MOST_BYTES = 4 * KIB, 128 * MIB
_SIZE_SECONDS = 0.4  # for each size
_LEAST_REPEATS, _MOST_REPEATS = 3, 300
_WARM = 2


@dataclass(frozen=True)
class MessageTime:
    """How long the sum of a buffer over all workers takes.

    Attributes:
        size: bytes of the buffer.
        seconds: the median on the slowest worker, with its quartiles.
    """

    size: int
    seconds: Spread


def bench_module(framework: str) -> Any:
    """Import a module of a framework's own part of this package.

    Args:
        framework: "torch" or "tf".
    """
    return import_module(bench_module_name(framework))


def bench_module_name(framework: str) -> str:
    """Return the name of the module."""
    return f"hvdtrain.tools.bench.{FRAMEWORKS[framework].module.split('.')[-2]}"


def sizes_up_to(most: int) -> Iterator[int]:
    """Yield the sizes, in bytes: powers of four, and the largest one."""
    size = LEAST_BYTES
    while size < most:
        yield size
        size *= 4
    yield most


def measure_messages(
    workers: Workers, framework: str, *, on_gpu: bool, sizes: Iterable[int], seconds: float
) -> list[MessageTime]:
    """Collective. Return how long sums take.

    Args:
        workers: the job's workers.
        framework: "torch" or "tf".
        on_gpu: whether the job computes on GPUs.
        sizes: bytes, the least first.
        seconds: when so much time is spent, larger sizes are left out.
    """
    found = []
    for size, times in time_sums(
        framework,
        on_gpu=on_gpu,
        sizes=sizes,
        seconds=seconds,
        longest_of=lambda own: float(max(workers.allgather_object(own))),
    ):
        quarter = statistics.quantiles(times, n=4)
        of_ranks = workers.allgather_object([statistics.median(times), quarter[0], quarter[2]])
        found.append(MessageTime(size, Spread(*max(of_ranks))))
    return found


def time_sums(
    framework: str,
    *,
    on_gpu: bool,
    sizes: Iterable[int],
    seconds: float,
    longest_of: Callable[[float], float],
) -> Iterator[tuple[int, list[float]]]:
    """Collective. Yield sizes with how long this worker's calls of Horovod took, as steps call it.

    Args:
        framework: "torch" or "tf".
        on_gpu: whether the buffers lie on the GPU.
        sizes: bytes, the least first.
        seconds: when so much time is spent, larger sizes are left out.
        longest_of: returns the largest of the numbers that the workers give; it is collective.
    """
    all_reduce_of = bench_module(framework).all_reduce_of
    begun = time.perf_counter()
    for size in sizes:
        ACTIVITY.enter(f"measuring all-reduces of {words_for_size(size)}", is_long=True)
        call = all_reduce_of(size, on_gpu)
        for _ in range(_WARM):
            call()
        longest = longest_of(_seconds_of(call))
        repeats = min(max(round(_SIZE_SECONDS / max(longest, 1e-6)), _LEAST_REPEATS), _MOST_REPEATS)
        yield size, [_seconds_of(call) for _ in range(repeats)]
        if longest_of(time.perf_counter() - begun) > seconds:
            break


def _seconds_of(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def words_for_size(size: int) -> str:
    """Return a number of bytes as 4 KiB or 16 MiB."""
    return f"{size // MIB} MiB" if size >= MIB and size % MIB == 0 else f"{size / KIB:,.0f} KiB"
