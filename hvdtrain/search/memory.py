"""How much memory a job may take on this host, and a worker that ends itself before it takes more."""

import json
import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

_POLL_SECONDS, _CHILDREN_SECONDS = 0.02, 1.0
_OWN_PAGES, _ALL_PAGES = ("RssAnon", "RssShmem"), "VmRSS"
_SHARE = 0.9  # of what is free when the search begins
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
OUT_OF_MEMORY_CODE = 12  # ENOMEM
_WORDS = (
    *("out of memory", "resource exhausted", "cannot allocate memory", "can't allocate memory"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed"),
)
_NAMES = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")


def free_bytes() -> int:
    """Return how much memory a job may take on this host: nine tenths of what is free.

    What is free is the least of the host's free memory and of what the limits of this process's cgroups
    leave, which a container sets.
    """
    free = [int(psutil.virtual_memory().available)]
    for folder in _cgroups():
        for limit, used in _LIMITS:
            with suppress(OSError, ValueError):  # no limit is the word "max"
                limit_bytes = int((folder / limit).read_text())
                free.append(limit_bytes - int((folder / used).read_text()) + _cache_bytes(folder))
    return int(_SHARE * max(min(free), 0))


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
    """Return the memory that a process has for itself or shares with others; 0 if it has ended.

    Pages of files that are mapped, such as those of a data set, do not count: the kernel drops them when it
    needs the room.
    """
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
        if any(name.lower() in text for name in _NAMES):  # an error of the task's code, in words
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class MemoryWatch:
    """A thread that ends this process when it takes more memory than it may, and says so in a file.

    The kernel would end a process too, but perhaps another one, and after the host has swapped.

    Args:
        limit: how much this process and those that it starts may take.
        marker: the file.
    """

    def __init__(self, limit: int, marker: Path) -> None:
        self._limit, self._marker = limit, marker
        self._own_bytes = self._children_bytes = 0
        threading.Thread(target=self._watch, daemon=True, name="watch memory").start()

    @property
    def peak(self) -> int:
        """The most memory that this process has had, with the most that those it started had together."""
        return max(self._own_bytes, taken_bytes()) + self._children_bytes

    def _watch(self) -> None:
        is_over, looked_seconds, children = threading.Event(), -math.inf, 0
        while not is_over.wait(_POLL_SECONDS):
            if time.monotonic() >= looked_seconds + _CHILDREN_SECONDS:
                children, looked_seconds = _children_bytes(), time.monotonic()
                self._children_bytes = max(self._children_bytes, children)
            own = taken_bytes()
            self._own_bytes = max(self._own_bytes, own)
            if own + children > self._limit:
                taken = f"{(own + children) / 2**20:,.0f}"
                mark(self._marker, f"a worker took {taken} of {self._limit / 2**20:,.0f} MiB")
                os._exit(OUT_OF_MEMORY_CODE)


def _children_bytes() -> int:
    """Return the memory of the processes that this one started, such as readers."""
    return sum(taken_bytes(child.pid) for child in psutil.Process().children(recursive=True))


def mark(marker: Path, why: str) -> None:
    """Write why a micro-batch does not fit; whole, since several workers may do so at once."""
    part = marker.with_name(f"{marker.name}.{os.getpid()}")
    part.write_text(json.dumps(why), encoding="utf-8")
    part.replace(marker)
