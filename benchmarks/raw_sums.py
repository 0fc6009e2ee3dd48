"""Sums over workers through Horovod, in turn with the call below it: MPI_Allreduce, Gloo's or NCCL's.

    horovodrun --gloo -np 2 python benchmarks/raw_sums.py --framework torch --bytes 4096 1048576

Both calls run in the same processes, so that what else the machine does affects both. Over MPI the other call
sums numpy buffers by mpi4py; over Gloo and with --gpu it is PyTorch's, between the workers of one host. A row
gives medians on the slowest worker, and ``ratio``, Horovod's time over the other's.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np

from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.tools.message_times import bench_module

WARM, SECONDS, REPEATS = 3, 0.4, (3, 300)  # of each size


def other_call(size: int, by_mpi: bool, on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums a buffer of so many bytes without Horovod."""
    if by_mpi and not on_gpu:
        mpi = import_module("mpi4py.MPI")
        buffer = np.zeros(size // 4, np.float32)
        return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, buffer)
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    tensor = torch.zeros(size // 4, device="cuda" if on_gpu else "cpu")

    def reduce() -> None:
        distributed.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()

    return reduce


def seconds_of(call: Callable[[], None]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    """Measure; rank 0 prints, and writes a list of what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="torch", help="that calls Horovod")
    parser.add_argument("--bytes", nargs="+", type=int, default=[4 << 10, 1 << 20, 16 << 20])
    parser.add_argument("--gpu", action="store_true", help="sum on GPUs, by NCCL")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    hvd = import_module(FRAMEWORKS[args.framework].horovod)
    hvd.init()
    by_mpi = bool(hvd.mpi_enabled())
    gather = import_module(f"{FRAMEWORKS[args.framework].horovod}.functions").allgather_object
    folder = tempfile.mkdtemp(prefix="raw-sums-") if hvd.rank() == 0 else ""
    store = Path(gather(folder)[0], "store")
    if not by_mpi or args.gpu:
        if args.gpu:
            import_module("torch").cuda.set_device(hvd.local_rank())
        import_module("torch.distributed").init_process_group(
            "nccl" if args.gpu else "gloo", init_method=store.as_uri(), rank=hvd.rank(), world_size=hvd.size()
        )
    rows = []
    for size in args.bytes:
        horovod = bench_module(args.framework).all_reduce_of(size, args.gpu)
        calls = [horovod, other_call(size, by_mpi, args.gpu)]
        longest = max(gather(max(seconds_of(call) for _ in range(WARM) for call in calls)))
        repeats = min(max(round(SECONDS / longest), REPEATS[0]), REPEATS[1])
        taken = [[seconds_of(call) for call in calls] for _ in range(repeats)]
        own = [statistics.median(times) for times in zip(*taken, strict=True)]
        slowest = [max(times) for times in zip(*gather(own), strict=True)]
        rows.append({"bytes": size, "horovod": slowest[0], "bare": slowest[1]})
        if hvd.rank() == 0:
            cells = [f"{1e6 * one:>10,.0f} us" for one in slowest]
            print(f"{size:>12,} bytes", *cells, f"ratio {slowest[0] / slowest[1]:.2f}")
    if args.json and hvd.rank() == 0:
        args.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
