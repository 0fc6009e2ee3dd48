"""The messages in which a job exchanges what its workers learn, and how long all-reduces take by size."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

from hvdtrain.backends.reduction.local_steps import in_parts
from hvdtrain.backends.reduction.low_rank import matrix_shape
from hvdtrain.backends.reduction.shards import LEAST_BYTES as LEAST_EARLY_BYTES
from hvdtrain.backends.reduction.shards import divide
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of, rank_of
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.tools.spread import Spread
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers

KIB, MIB = 2**10, 2**20
LEAST_BYTES, MOST_BYTES = 4 * KIB, 128 * MIB
_SIZE_SECONDS = 0.4  # for each size
_LEAST_REPEATS, _MOST_REPEATS = 3, 300
_WARM = 2

Shapes = Iterable[tuple[int, ...]]


@dataclass(frozen=True)
class Way:
    """The messages in which a job exchanges what its workers learn."""

    name: str  # "none", "fp16", "powersgd:RANK" or "sync-every N"
    sizes: Sequence[int]  # bytes of the messages that are summed, one after the other
    small: int = 0  # messages of few bytes in addition: the metrics of the step
    agreements: int = 1  # how often all wait until every worker is ready for the next messages
    every: int = 1  # steps from one exchange to the next
    # bytes of the messages that are sent during the backward pass, between hosts and where the job overlaps
    # within one; none if it never does
    early: Sequence[int] = ()
    passes: int = 1  # backward passes of a step: messages are sent in the last


def way_of(config: Config, shapes: Shapes, *, on_gpu: bool) -> Way:
    """Return the messages of a job whose parameters have these shapes; on GPUs there are several buffers."""
    if config.sync_every is not None:
        slots = 2 if config.optimizer in ("adamw", "lamb") else int(bool(config.momentum))
        return local_steps(shapes, config.sync_every, slots)
    rank = rank_of(config.compression)
    if rank is not None:
        return low_rank(shapes, rank)
    is_xla = config.compile and config.framework == "tf"
    overlap = "false" if is_xla else config.overlap
    return buffers(shapes, config.compression, on_gpu=on_gpu, overlap=overlap, passes=config.accumulate)


def buffers(
    shapes: Shapes, compression: str = "none", *, on_gpu: bool = False, overlap: str = "auto", passes: int = 1
) -> Way:
    """Return the way of gradients in buffers; in fp32 the metrics travel with them."""
    sizes = {str(number): 4 * prod(shape) for number, shape in enumerate(shapes)}
    number_bytes = compression_of(compression).number_bytes

    def messages(are_early: bool) -> tuple[int, ...]:
        buckets = divide(dict(reversed(sizes.items())), are_early)
        return tuple(sum(sizes[name] for name in names) * number_bytes // 4 for names in buckets)

    overlaps = overlap == "true" or (overlap == "auto" and on_gpu)
    may_overlap = overlaps or (overlap == "auto" and sum(sizes.values()) >= 2 * LEAST_EARLY_BYTES)
    early = messages(True) if may_overlap else ()
    return Way(compression, messages(overlaps), small=int(number_bytes != 4), early=early, passes=passes)


def low_rank(shapes: Shapes, rank: int) -> Way:
    """Return the way of PowerSGD after the warm-up: products and other gradients first, then the factors."""
    products = factors = others = 0
    for shape in shapes:
        matrix = matrix_shape(shape, rank)
        if matrix is None:
            others += prod(shape)
        else:
            products += matrix[0] * rank
            factors += matrix[1] * rank
    sizes = [4 * (products + others), 4 * factors]
    return Way(f"powersgd:{rank}", tuple(filter(None, sizes)), agreements=2 if factors else 1)


def local_steps(shapes: Shapes, every: int, slots: int) -> Way:
    """Return the way of local steps: the parameters and what the optimizer keeps, and then the metrics."""
    tensors = [4 * prod(shape) for shape in shapes for _ in range(1 + slots)]
    parts = in_parts([("", size) for size in tensors])
    sizes = tuple(sum(tensors[place] for place in part) for part in parts)
    return Way(f"sync-every {every}", sizes, small=1, agreements=len(sizes) + 1, every=every)


def bench_module(framework: str) -> Any:
    """Import a framework's own part of this package."""
    return import_module(bench_module_name(framework))


def bench_module_name(framework: str) -> str:
    """Return the name of a framework's own part of this package."""
    return f"hvdtrain.tools.{FRAMEWORKS[framework].module.split('.')[-2]}"


def measure_messages(
    workers: Workers, framework: str, *, on_gpu: bool, most_bytes: int, seconds: float
) -> list[tuple[int, Spread]]:
    """Collective. Return sizes, with how long their sums take on the slowest worker: median and quartiles."""
    found, begun = [], time.perf_counter()
    all_reduce_of = bench_module(framework).all_reduce_of
    powers = [LEAST_BYTES * 4**power for power in range(16)]
    for size in (*(size for size in powers if size < most_bytes), most_bytes):
        ACTIVITY.enter(f"measuring all-reduces of {words_for_size(size)}", is_long=True)
        call = all_reduce_of(size, on_gpu)
        for _ in range(_WARM):
            call()
        longest = max(workers.allgather_object(_seconds_of(call)))
        repeats = min(max(round(_SIZE_SECONDS / max(longest, 1e-6)), _LEAST_REPEATS), _MOST_REPEATS)
        times = [_seconds_of(call) for _ in range(repeats)]
        low, _, high = statistics.quantiles(times, n=4)
        found.append((size, Spread(*max(workers.allgather_object([statistics.median(times), low, high])))))
        if max(workers.allgather_object(time.perf_counter() - begun)) > seconds:
            break
    return found


def _seconds_of(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def words_for_size(size: int) -> str:
    """Return a number of bytes as 4 KiB or 16 MiB."""
    return f"{size // MIB} MiB" if size >= MIB and size % MIB == 0 else f"{size / KIB:,.0f} KiB"
