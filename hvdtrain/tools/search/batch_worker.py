"""A worker of a job that tries one micro-batch: a real training of some steps, in a process of its own."""

import itertools
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.backends.base import device_memory
from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.host.cores import is_out_of_memory, taken_bytes
from hvdtrain.metrics import StepInfo
from hvdtrain.tools.blocks import OpenRun, Recorder, bench_config, opened_run, run_block, steps_of_block
from hvdtrain.tools.launch import layers_from_json, run_worker

OUT_OF_MEMORY_CODE = 12  # ENOMEM
MARKER = ".out-of-memory"
_FIRST_STEPS, _LOSSES = 5, 8  # the losses of the first steps tell whether the curve is the same
_LOOKS_PER_SECOND = 50


class _LossRecorder(Recorder):
    """A recorder that keeps the losses of the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Keep what a step's metrics say."""
        super().on_step(step, metrics)
        if len(self.losses) < _LOSSES:
            self.losses.append(metrics.mean("loss"))


class MemoryWatch(threading.Thread):
    """A thread that ends this process when it takes more memory than it may, and says so in a file.

    The kernel would end a process too, but perhaps another one, and after the host has swapped.

    Args:
        limit: how much this process and those that it starts, such as readers, may take together.
        marker: the file.
    """

    def __init__(self, limit: int, marker: Path) -> None:
        super().__init__(daemon=True, name="watch memory")
        self._limit, self._marker, self.peak = limit, marker, 0

    def run(self) -> None:
        """Look until the process ends, at other processes about once a second: finding them takes long."""
        for look in itertools.count():
            if look % _LOOKS_PER_SECOND == 0:
                children = psutil.Process().children(recursive=True)
                of_children = sum(taken_bytes(child.pid) for child in children)
            taken = taken_bytes() + of_children
            self.peak = max(self.peak, taken)
            if taken > self._limit:
                mib = f"{taken / 2**20:,.0f} of {self._limit / 2**20:,.0f} MiB"
                mark(self._marker, f"a worker took {mib}")
                os._exit(OUT_OF_MEMORY_CODE)
            time.sleep(1 / _LOOKS_PER_SECOND)


def mark(marker: Path, why: str) -> None:
    """Write why a micro-batch does not fit; whole, since several workers may do so at once."""
    part = marker.with_name(f"{marker.name}.{os.getpid()}")
    part.write_text(json.dumps(why), encoding="utf-8")
    part.replace(marker)


def work(specification: dict[str, Any]) -> None:
    """Collective. Train with a micro-batch, and write on rank 0 how fast it was and what it took."""
    found = Path(specification["found"])
    marker = found.with_suffix(MARKER)
    watch = MemoryWatch(specification["limit"], marker)
    watch.start()
    try:
        with opened_run(layers_from_json(specification["layers"]), bench_config) as run:
            measured = _measured(run, watch, specification["seconds"])
    except BaseException as error:
        if is_out_of_memory(error):
            text = str(error) or type(error).__name__
            mark(marker, f"memory did not suffice: {text.splitlines()[0]}")
        raise
    if measured is not None:
        found.write_text(json.dumps(measured), encoding="utf-8")


def _measured(run: OpenRun, watch: MemoryWatch, seconds: float) -> dict[str, Any] | None:
    """Collective. Train, and return what was found on rank 0, None on other ranks."""
    session, recorder = run.session, _LossRecorder()
    session.services.report = recorder
    workers = session.backend.workers
    first = sum(run_block(session, recorder, _FIRST_STEPS)[0]) / _FIRST_STEPS
    steps = steps_of_block(seconds, max(workers.allgather_object(first)))
    own_seconds = sum(run_block(session, recorder, steps)[0])
    device = device_memory(session.backend)
    own = (workers.host, own_seconds, watch.peak, None if device is None else device.peak)
    gathered = workers.allgather_object(own)
    if workers.rank:
        return None
    of_hosts: Counter[str] = Counter()
    for host, _, taken, _ in gathered:
        of_hosts[host] += taken
    return {
        "device": session.backend.info.description,
        "samples_per_second": session.plan().batch.global_batch * steps / max(one[1] for one in gathered),
        "host_bytes": max(of_hosts.values()),
        "device_bytes": max((one[3] for one in gathered if one[3] is not None), default=None),
        "losses": recorder.losses,
    }


if __name__ == "__main__":
    run_worker(work)
