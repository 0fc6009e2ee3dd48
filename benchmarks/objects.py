"""Time of an object between workers: by Horovod's functions, which pickle it, and as hvdtrain sends it.

    horovodrun --gloo -np 2 python benchmarks/objects.py torch
    horovodrun --mpi -np 2 python benchmarks/objects.py tf

The calls alternate, so that what else the machine does meets both. Prints medians in milliseconds.
"""

import sys
import time
from importlib import import_module
from statistics import median

import numpy as np

from hvdtrain.backends.workers import HorovodWorkers

ROUNDS = {"50 numbers by name": 60, "16 MB of rows": 3}


def main(framework: str) -> None:
    hvd = import_module({"torch": "horovod.torch", "tf": "horovod.tensorflow"}[framework])
    folder = {"torch": "torch", "tf": "tensorflow"}[framework]
    collectives = import_module(f"hvdtrain.backends.{folder}.objective.gathering").COLLECTIVES()
    hvd.init()
    workers = HorovodWorkers(hvd, collectives)
    values = {
        "50 numbers by name": (workers.host, {f"name {number}": number for number in range(50)}),
        "16 MB of rows": (np.arange(4096), {"outputs": np.zeros((4096, 1000), np.float32)}),
    }
    calls = {
        "allgather, Horovod's": lambda value: hvd.allgather_object(value, name="timed"),
        "allgather, hvdtrain's": workers.allgather_object,
        "broadcast, Horovod's": lambda value: hvd.broadcast_object(value, root_rank=0, name="timed.b"),
        "broadcast, hvdtrain's": workers.broadcast_object,
    }
    for what, value in values.items():
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS[what] + 1):
            for name, call in calls.items():
                begun = time.perf_counter()
                call(value)
                times[name].append((time.perf_counter() - begun) * 1000)
        if workers.rank == 0:
            for name, found in times.items():
                where = f"{framework} over {workers.controller}"
                print(f"{where}  {what:<20} {name:<22} {median(found[1:]):9.2f} ms")


if __name__ == "__main__":
    main(sys.argv[1])
