"""Benchmarks: how fast hosts compute, and how fast messages travel between them."""

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import combinations
from statistics import median
from typing import Any

from hvdtrain.host.processes import run_limited

KIB, MIB = 2**10, 2**20
SIZES = (KIB, 32 * KIB, MIB, 8 * MIB, 64 * MIB)  # bytes of messages
_SIZE_SECONDS = 0.4  # time spent on each size
_LONGEST_SECONDS = 4.0  # sizes that would take longer are skipped
_MAX_REPEATS = 100
_MAX_HOSTS_ALL_PAIRS = 4
_COMPUTE_LIMIT_SECONDS = 30
_COMPUTE = """
import json, time
import numpy as np
a = np.full((256, 256), 0.5, "float32")
a @ a
tries = []
for _ in range(3):
    start, used, done = time.perf_counter(), time.process_time(), 0
    while (seconds := time.perf_counter() - start) < 0.35:
        a @ a
        done += 1
    tries.append((done * 2 * 256**3 / seconds / 1e9, (time.process_time() - used) / seconds))
print(json.dumps(dict(zip(("gflops", "core_share"), max(tries)))))
"""


def compute() -> dict[str, Any]:
    """Multiply matrices on one thread for about a second, and take the best of three tries.

    Return ``gflops``, and ``core_share``, the fraction of a core that the process got; or ``error``.
    """
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    try:
        command = [sys.executable, "-c", _COMPUTE]
        done = run_limited(command, _COMPUTE_LIMIT_SECONDS, {**os.environ, **one_thread})
        result: dict[str, Any] = json.loads(done.output)
    except (OSError, ValueError) as error:
        return {"error": f"the compute benchmark failed: {type(error).__name__}"}
    return result


def pairs_of(agents: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of agents that time messages: all, or of many those with the first one."""
    first = agents if len(agents) <= _MAX_HOSTS_ALL_PAIRS else agents[:1]
    return [pair for pair in combinations(agents, 2) if pair[0] in first]


def message_times(send: Callable[[memoryview], None]) -> dict[str, float]:
    """Time messages with a function that sends one and waits for a short acknowledgement.

    Return median round-trip seconds by size in bytes, as text; without sizes that would take too long.
    """
    message = memoryview(bytearray(SIZES[-1]))
    times: dict[str, float] = {}
    last_size, last_seconds = 1, 0.0
    for size in SIZES:
        if last_seconds * size / last_size > _LONGEST_SECONDS and last_size >= MIB:
            break
        taken: list[float] = []
        while len(taken) < _MAX_REPEATS and sum(taken) < _SIZE_SECONDS:
            start = time.perf_counter()
            send(message[:size])
            taken.append(time.perf_counter() - start)
        last_size, last_seconds = size, median(taken)
        times[str(size)] = last_seconds
    return times


def bytes_per_second(times: dict[str, float], size: int) -> float | None:
    """Return the bandwidth at a message size, without the acknowledgement's time; None if not measured."""
    seconds = times.get(str(size))
    return None if seconds is None else size / max(seconds - times[str(SIZES[0])] / 2, 1e-9)


def bus_bytes_per_second(size: int, workers: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce: 2 (n - 1) / n x bytes / seconds, as NCCL's tests do."""
    return 2 * (workers - 1) / workers * size / seconds
