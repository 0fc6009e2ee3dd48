"""How long sums over the workers take, against their size: through Horovod, and without it."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.tools.bench.measure import bench_module
from hvdtrain.tools.bench.spread import Spread
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers

_START_SECONDS = 60
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Raw:
    """Another way to sum over the workers.

    Attributes:
        name: what calls it, in words; empty if there is none.
        of_size: returns a function that sums a buffer of so many bytes. It is collective.
        reason: why there is none.
    """

    name: str
    of_size: Callable[[int], Callable[[], None]] | None = None
    reason: str = ""


@contextmanager
def raw_calls(workers: Workers, on_gpu: bool) -> Iterator[Raw]:
    """Collective. Return a context with what Horovod's transport does without Horovod.

    Args:
        workers: the job's workers.
        on_gpu: whether the job computes on GPUs.
    """
    reason = _reason(workers, on_gpu)
    reasons = [one for one in workers.allgather_object(reason) if one]
    if reasons:
        yield Raw("", reason=reasons[0])
    elif workers.controller == "MPI" and not on_gpu:
        yield _mpi()
    else:
        with _process_group(workers, "nccl" if on_gpu else "gloo") as raw:
            yield raw


def _reason(workers: Workers, on_gpu: bool) -> str:
    """Return why there is no other call to compare with; empty if there is one."""
    if workers.controller == "MPI" and not on_gpu:
        mpi = import_module("mpi4py.MPI")
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            return "MPI runs without THREAD_MULTIPLE, so only Horovod's thread may call it"
        return "" if mpi.COMM_WORLD.Get_size() == workers.size else "mpi4py sees another number of workers"
    if workers.local_size != workers.size:
        return "over Gloo and NCCL, the workers of one host are compared only"
    return _reason_of_torch(on_gpu)


def _reason_of_torch(on_gpu: bool) -> str:
    """Return why PyTorch's Gloo or NCCL cannot be called; empty if it can."""
    if find_spec("torch") is None:
        return "PyTorch, whose Gloo and NCCL would be called, is not installed"
    try:
        torch, distributed = import_module("torch"), import_module("torch.distributed")
    except Exception as error:  # one that is broken, or does not go with TensorFlow
        return f"PyTorch, whose Gloo and NCCL would be called, cannot be imported: {error}"
    if on_gpu and not torch.cuda.is_available():
        return "PyTorch, whose NCCL would be called, sees no GPU"
    if not distributed.is_available():
        return "this PyTorch is built without torch.distributed"
    return "the task uses torch.distributed itself" if distributed.is_initialized() else ""


def _mpi() -> Raw:
    mpi = import_module("mpi4py.MPI")

    def of_size(size: int) -> Callable[[], None]:
        buffer = np.zeros(size // 4, np.float32)
        return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, buffer)

    return Raw("MPI_Allreduce", of_size)


@contextmanager
def _process_group(workers: Workers, transport: str) -> Iterator[Raw]:
    """Collective. Return a context with PyTorch's own group of the workers of this host.

    They find each other by a file and talk over the loopback interface: nothing listens on others.
    """
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    if transport == "nccl":
        torch.cuda.set_device(workers.local_rank)
    own_folder = "" if workers.rank else tempfile.mkdtemp(prefix="hvdtrain-bench-")
    try:
        store = Path(workers.broadcast_object(own_folder), "store")
        with _on_loopback():
            try:
                own_problem = _join_group(distributed, transport, workers, store)
                problems = [one for one in workers.allgather_object(own_problem) if one]
                name = {"gloo": "Gloo", "nccl": "NCCL"}[transport]
                yield (
                    Raw("", reason=problems[0])
                    if problems
                    else Raw(name, _calls(torch, distributed, transport))
                )
            finally:
                if distributed.is_initialized():
                    distributed.destroy_process_group()
        workers.barrier()  # a process whose group is destroyed when the file is gone is aborted
    finally:
        if own_folder:
            shutil.rmtree(own_folder, ignore_errors=True)


def _join_group(distributed: Any, transport: str, workers: Workers, store: Path) -> str:
    """Return why PyTorch's group of workers does not start; empty if it does."""
    try:
        distributed.init_process_group(
            transport,
            init_method=store.as_uri(),
            rank=workers.rank,
            world_size=workers.size,
            timeout=timedelta(seconds=_START_SECONDS),
        )
    except Exception as error:  # of many kinds; the other workers learn of it
        return f"PyTorch's group of workers does not start: {error}"
    return ""


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Return a context in which Gloo uses the loopback interface."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE)
        if before is not None:
            os.environ[_INTERFACE] = before


def _calls(torch: Any, distributed: Any, transport: str) -> Callable[[int], Callable[[], None]]:
    device = "cuda" if transport == "nccl" else "cpu"

    def of_size(size: int) -> Callable[[], None]:
        tensor = torch.zeros(size // 4, device=device)

        def reduce() -> None:
            distributed.all_reduce(tensor)
            if device == "cuda":
                torch.cuda.synchronize()

        return reduce

    return of_size


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
    all_reduce_of = bench_module(framework).all_reduce_of
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
