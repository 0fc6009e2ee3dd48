"""The cores and compute threads of a worker."""

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path

import psutil

_OWN_PAGES, _ALL_PAGES, _PEAK = ("RssAnon", "RssShmem"), "VmRSS", "VmHWM"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_SHARE = 0.9  # of what is free when the search begins
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_WORDS = (
    *("out of memory", "resource exhausted", "cannot allocate memory", "can't allocate memory"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed"),
)
_NAMES = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")


def limit_bytes(workers: int) -> int:
    """Return how much memory each worker of this host may take: the least of what limits it."""
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    each = min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())]) // workers
    return each if own == resource.RLIM_INFINITY else min(each, own)


def peak_bytes() -> int:
    """Return the most memory that this process has had resident, pages of files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed() -> None:
    """Let glibc keep freed memory, which it may give back and take anew in each step, page by page."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
        library.mallopt(_TRIM_THRESHOLD, 128 << 20)


def free_bytes() -> int:
    """Return how much memory a job may take on this host: nine tenths of what is free."""
    free = [int(psutil.virtual_memory().available), *(limit - used for limit, used in _limits())]
    return int(_SHARE * max(min(free), 0))


def _limits() -> list[tuple[int, int]]:
    """Return the limits of this process's cgroups, with what is used of each but for files."""
    found = []
    for folder in _cgroups():
        for limit, used in _LIMITS:
            with suppress(OSError, ValueError):  # no limit is the word "max"
                numbers = [int((folder / name).read_text()) for name in (limit, used)]
                found.append((numbers[0], numbers[1] - _cache_bytes(folder)))
    return found


def _cgroups() -> list[Path]:
    """Return the folders of this process's cgroups and of all above them."""
    found = [_CGROUP, _CGROUP / "memory"]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                folder = _CGROUP / kinds / path.lstrip("/")
                found += [folder, *(one for one in folder.parents if one.is_relative_to(_CGROUP))]
    return list(dict.fromkeys(found))


def _cache_bytes(folder: Path) -> int:
    """Return what of a cgroup's memory are files, which the kernel drops when it needs the room."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def taken_bytes(process: int | str = "self") -> int:
    """Return the memory that a process has for itself or shares with others; 0 if it has ended."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in (*_OWN_PAGES, _ALL_PAGES):
                found[name] = int(value.split()[0]) * 1024
    own = [found[name] for name in _OWN_PAGES if name in found]
    return sum(own) if own else found.get(_ALL_PAGES, 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it comes from, says that memory does not suffice."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if type(seen).__name__ in _NAMES or any(word in text for word in _WORDS):
            return True
        if any(name.lower() in text for name in _NAMES):  # an error of the task's code, as text
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def threads_per_worker(local_size: int) -> int:
    """Return the number of compute threads of this worker, at least 1."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return max(1, int(cores_per_worker(local_size)))


def cores_per_worker(local_size: int) -> float:
    """Return how many cores this worker has."""
    own = len(os.sched_getaffinity(0))
    try:
        shared = len(psutil.Process(os.getppid()).cpu_affinity())
    except psutil.Error:
        shared = own
    return min(own, shared / local_size)
