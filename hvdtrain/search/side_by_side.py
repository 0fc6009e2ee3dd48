"""What trials side by side get of this host: cores, threads and GPUs."""

import os
from pathlib import Path

from hvdtrain.bench.sweep import check_slots
from hvdtrain.config import Config
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.words import counted

_GPUS = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU = "-1"  # CUDA takes none of those that follow


def check_cores(workers: int, parallel: int, hosts: str | None) -> str:
    """Return hosts and slots of a trial.

    Raises:
        UsageError: If there are fewer cores than workers, or trials side by side on several hosts.
    """
    if parallel > 1 and hosts:
        raise UsageError("--parallel runs trials side by side on this host", "Leave -H out.")
    found = check_slots((workers,), hosts, may_share=False)
    if hosts:
        return found
    cores = len(os.sched_getaffinity(0))
    if parallel * workers > cores:
        raise UsageError(
            f"parallel {parallel}: {counted(parallel * workers, 'worker')} need a core each, of {cores}",
            f"At most --parallel {max(1, cores // workers)}.",
        )
    return f"localhost:{workers}"


def threads_of(workers: int, parallel: int) -> int | None:
    """Return how many threads each worker of trials side by side has; None if one trial runs at once."""
    return max(1, len(os.sched_getaffinity(0)) // (parallel * workers)) if parallel > 1 else None


def check_gpus(workers: int, parallel: int, config: Config) -> list[str]:
    """Return the GPUs that trials side by side share, one for each worker; empty if there are none.

    Raises:
        EnvironmentFault: If there are too few.
    """
    if parallel == 1 or config.device == "cpu" or not _GPUS.is_dir():
        return []
    found = _visible()
    if found and len(found) < parallel * workers:
        raise EnvironmentFault(
            f"parallel {parallel}: {counted(parallel * workers, 'worker')} need a GPU each, of {len(found)}",
            f"At most --parallel {max(1, len(found) // workers)}, or --device cpu.",
        )
    return found


def _visible() -> list[str]:
    """Return this host's GPUs as CUDA_VISIBLE_DEVICES names them: those that it names, or all."""
    if (given := os.environ.get(VISIBLE)) is None:
        return [str(number) for number in range(len(list(_GPUS.iterdir())))]
    found: list[str] = []
    for name in map(str.strip, given.split(",")):
        if name in ("", _NO_GPU):
            break
        found.append(name)
    return found
