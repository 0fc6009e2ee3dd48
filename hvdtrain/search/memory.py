"""A worker that ends itself before it takes more memory than a search may."""

import json
import math
import os
import threading
import time
from pathlib import Path

import psutil

from hvdtrain.host.memory import taken_bytes

_POLL_SECONDS, _CHILDREN_SECONDS = 0.02, 1.0
OUT_OF_MEMORY_CODE = 12  # ENOMEM


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
