"""The cores and compute threads of a worker."""

import os

import psutil


def threads_per_worker(local_size: int) -> int:
    """Return the number of compute threads of this worker, at least 1.

    OMP_NUM_THREADS takes precedence if it is set. Otherwise it is the number of whole cores per worker.

    Args:
        local_size: number of workers on this host.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return max(1, int(cores_per_worker(local_size)))


def cores_per_worker(local_size: int) -> float:
    """Return how many cores this worker has.

    The workers of a host share the cores of the launcher's process evenly. If the launcher has bound this
    worker to fewer cores, the worker has only those.

    Args:
        local_size: number of workers on this host.
    """
    own = len(os.sched_getaffinity(0))
    try:
        shared = len(psutil.Process(os.getppid()).cpu_affinity())
    except psutil.Error:
        shared = own
    return min(own, shared / local_size)
