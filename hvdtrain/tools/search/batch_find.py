"""Finding a micro-batch: each is tried by a job of its own, which may run out of memory."""

import itertools
import json
import math
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.cores import free_bytes, is_out_of_memory, taken_bytes
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import check_is_not_launched
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.files import exchange_folder
from hvdtrain.tools.blocks import OpenRun, Recorder, bench_config, opened_run, run_block, steps_of_block
from hvdtrain.tools.launch import (
    check_slots,
    horovodrun,
    layers_from_json,
    layers_to_json,
    run_module,
    run_worker,
)
from hvdtrain.tools.output import check_writable, config_files, said_if_interrupted, say, show_found
from hvdtrain.tools.search import batch_sizes
from hvdtrain.tools.search.batch_sizes import BatchSize, BatchSizes, Tried
from hvdtrain.tools.search.options import BatchOptions

_MORE_SECONDS, _FACTOR = 300.0, 10.0  # in addition to the measurement: to start, and to compile
OUT_OF_MEMORY_CODE = 12  # ENOMEM
_KILLED = re.compile(rf"exit (code|status):? *(-9|137|{OUT_OF_MEMORY_CODE})\b|signal 9|SIGKILL|\bKilled\b")


def run_batch_find(layers: list[Layer], options: BatchOptions) -> None:
    """Find a micro-batch, show what was found, and write it where the options say."""
    check_may_be_elastic(None)
    check_is_not_launched("batch-find", "-np N ...")
    check_writable(options.json_path, read=config_files(layers))
    with said_if_interrupted():
        found = find_sizes(layers, options)
    show_found(found.describe(), found.to_document(), options.json_path)


def find_sizes(layers: list[Layer], options: BatchOptions) -> BatchSizes:
    """Try micro-batches with the job's global batch, and return what was found."""
    workers = options.num_proc
    hosts = check_slots((workers,), options.hosts, may_share=False)
    hosts = hosts if options.hosts else f"localhost:{workers}"
    _, config = settle(layers)  # what is wrong is said before workers are started
    check(Job(config, command="batch-find"))
    own, limit = batch_sizes.batch_size_of(config, workers), options.memory or free_bytes()
    here = max(host.slots for host in parse_host_list(hosts))
    with interruptible(), exchange_folder(shared=bool(options.hosts)) as folder:
        jobs = _Jobs(layers, options, hosts, folder, limit // min(here, workers))
        tried = _search(jobs, own, batch_sizes.sizes_to_try(config, workers))
    tried.sort(key=lambda one: one.size.micro_batch)
    return BatchSizes(config.task, jobs.device, workers, own, tried, limit)


def _search(jobs: "_Jobs", own: BatchSize, sizes: list[BatchSize]) -> list[Tried]:
    """Try the job as it is, then the others, the smallest first, up to one that lacks memory."""
    say(f"the job as it is: {own.options} ...")
    tried = [jobs.run(own)]
    too_large = own.micro_batch if tried[0].lacks_memory else math.inf
    for size in sizes:
        if size == own:
            continue
        if size.micro_batch >= too_large:
            tried.append(Tried(size, problem="not tried: a smaller one does not fit"))
            continue
        say(f"{size.options} ...")
        tried.append(jobs.run(size))
        if tried[-1].problem:
            say(f"  {tried[-1].problem}")
        if tried[-1].lacks_memory:
            too_large = size.micro_batch
    return tried


@dataclass
class _Jobs:
    """Runs the job with one micro-batch after the other; ``limit`` is what a worker may take of memory."""

    layers: list[Layer]
    options: BatchOptions
    hosts: str
    folder: Path
    limit: int
    device: str = ""
    _runs: int = 0

    def run(self, size: BatchSize) -> Tried:
        """Run the job with a micro-batch; raise if the first, the job as it is, fails, and not for memory."""
        self._runs += 1
        folder, seconds = self.folder / str(self._runs), self.options.seconds
        layers = layers_to_json([*self.layers, Layer("batch-find", dict(size.values))])
        values = {"layers": layers, "limit": self.limit, "seconds": seconds}
        launcher = horovodrun(self.options.num_proc, self.hosts, self.options.controller)
        limit_seconds = _FACTOR * seconds + _MORE_SECONDS
        try:
            module = "hvdtrain.tools.search.batch_find"
            document = run_module("the job", launcher, module, values, folder, limit_seconds)
        except EnvironmentFault as error:
            return self._failed(size, error, folder / MARKER)
        self.device = document.pop("device")
        return Tried(size, **document)

    def _failed(self, size: BatchSize, error: EnvironmentFault, marker: Path) -> Tried:
        if marker.is_file():
            why = json.loads(marker.read_text(encoding="utf-8"))
            return Tried(size, problem=f"does not fit: {why}", lacks_memory=True)
        if _KILLED.search(f"{error.problem}\n{error.remedy}"):
            return Tried(size, problem="does not fit: a worker was killed", lacks_memory=True)
        if self._runs == 1:
            raise error
        last = next((line for line in reversed(error.remedy.splitlines()) if line.strip()), "")
        return Tried(size, problem=f"failed: {error.problem}. {last.strip()}")


MARKER = "out-of-memory"
_FIRST_STEPS = 5  # by which the number of those that are measured is chosen
_LOOKS_PER_SECOND = 50


class MemoryWatch(threading.Thread):
    """A thread that ends this process when it and its readers take more memory than the limit, and marks why.

    The kernel would end a process too, but perhaps another one, and after the host has swapped.
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


def work(values: dict[str, Any]) -> dict[str, Any] | None:
    """Collective. Train with a micro-batch, and return on rank 0 how fast it was and what it took."""
    marker = Path(values["found"]).with_name(MARKER)
    watch = MemoryWatch(values["limit"], marker)
    watch.start()
    try:
        with opened_run(layers_from_json(values["layers"]), bench_config) as run:
            return _measured(run, watch, values["seconds"])
    except BaseException as error:
        if is_out_of_memory(error):
            text = str(error) or type(error).__name__
            mark(marker, f"memory did not suffice: {text.splitlines()[0]}")
        raise


def _measured(run: OpenRun, watch: MemoryWatch, seconds: float) -> dict[str, Any] | None:
    """Collective. Train, and return what was found on rank 0, None on other ranks."""
    session, recorder = run.session, Recorder()
    session.services.report = recorder
    workers = session.backend.workers
    first = sum(run_block(session, recorder, _FIRST_STEPS)[0]) / _FIRST_STEPS
    steps = steps_of_block(seconds, max(workers.allgather_object(first)))
    own_seconds = sum(run_block(session, recorder, steps)[0])
    device = session.backend.device_memory()
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
    }


if __name__ == "__main__":
    run_worker(work)
