"""How many compute threads a worker gets."""

import os

import psutil


def threads_per_worker(local_size: int) -> int:
    """Give one worker's share of its host's cores; at least 1.

    Args:
        local_size: workers on this host.

    The launcher's own processor set is what the workers share; where the launcher bound this
    worker to fewer cores, those are all it gets. OMP_NUM_THREADS of the user's goes before.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return max(1, int(cores_per_worker(local_size)))


def cores_per_worker(local_size: int) -> float:
    """Give how many cores a worker has: those it is bound to, or its share of the launcher's."""
    own = len(os.sched_getaffinity(0))
    try:
        shared = len(psutil.Process(os.getppid()).cpu_affinity())
    except psutil.Error:
        shared = own
    return min(own, shared / local_size)
