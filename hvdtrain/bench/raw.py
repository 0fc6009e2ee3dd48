"""The same sum over workers without Horovod: MPI's own call, Gloo's, or NCCL's."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

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
