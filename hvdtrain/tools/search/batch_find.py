"""Finding a micro-batch: each is tried by a job of its own, which may run out of memory."""

import itertools
import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.config import Config, Layer
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.cores import free_bytes, is_out_of_memory, taken_bytes
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import check_is_not_launched
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.files import exchange_folder
from hvdtrain.storage.text import counted
from hvdtrain.tools.blocks import OpenRun, Recorder, bench_config, opened_run, run_block, steps_of_block
from hvdtrain.tools.launch import (
    check_slots,
    horovodrun,
    layers_from_json,
    layers_to_json,
    run_module,
    run_worker,
)
from hvdtrain.tools.output import check_writable, said_if_interrupted, say, show_found
from hvdtrain.tools.search.options import BatchOptions

VERSION = 1
_MOST = 8
_LEAST_RATIO = 1.5  # from one micro-batch to the next
_MIB = 2**20


@dataclass(frozen=True)
class BatchSize:
    """How a worker's part of a global batch is computed; ``global_batch`` if the job states it."""

    micro_batch: int
    accumulate: int
    global_batch: int | None = None

    @property
    def values(self) -> Mapping[str, Any]:
        """The config fields; the learning rate and its base batch follow from them as before."""
        if self.global_batch is None:
            return {"batch_size": self.micro_batch, "accumulate": self.accumulate}
        return {"global_batch_size": self.global_batch, "accumulate": self.accumulate}

    @property
    def options(self) -> str:
        """The same as options of the command line."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.values.items())


def batch_size_of(config: Config, workers: int, accumulate: int | None = None) -> BatchSize:
    """Return the micro-batch of a job as it is, or with other micro-batches per step."""
    count, whole = accumulate or config.accumulate, config.global_batch_size
    if whole is None:
        return BatchSize(config.batch_size * config.accumulate // count, count)
    return BatchSize(-(-whole // (workers * count)), count, whole)


def sizes_to_try(config: Config, workers: int) -> list[BatchSize]:
    """Return micro-batches with the job's global batch, the smallest first; the job's own is among them."""
    if config.global_batch_size is None:
        samples = config.batch_size * config.accumulate
        counts = [count for count in range(1, samples + 1) if samples % count == 0]
    else:
        counts = [1 << power for power in range((config.global_batch_size // workers).bit_length())]
    own, kept = batch_size_of(config, workers), list[BatchSize]()
    for size in (batch_size_of(config, workers, count) for count in counts):
        if not kept or kept[-1].micro_batch >= _LEAST_RATIO * size.micro_batch or size == own:
            kept.append(size)
    return sorted({*kept[:_MOST], own}, key=lambda size: size.micro_batch)


@dataclass(frozen=True)
class Tried:
    """A micro-batch that was tried."""

    size: BatchSize
    samples_per_second: float | None = None  # of all workers together; None if it was not measured
    host_bytes: int = 0  # the most memory that the workers of a host took
    device_bytes: int | None = None  # the most that a worker took on its GPU; None on the CPU
    problem: str = ""  # why it was not measured
    lacks_memory: bool = False  # whether that is because memory did not suffice


@dataclass(frozen=True)
class BatchSizes:
    """What ``batch-find`` found."""

    task: str  # the task's name or path
    device: str  # what it was computed on; empty if nothing was measured
    workers: int  # number of workers
    own: BatchSize  # the job as it is
    global_batch: int  # samples of a step, which all micro-batches have in common
    tried: Sequence[Tried]  # what was tried, the smallest micro-batch first
    limit: int  # how much memory the workers of a host could take

    @property
    def largest(self) -> Tried | None:
        """The largest micro-batch that fits."""
        return next((one for one in reversed(self.tried) if one.samples_per_second is not None), None)

    @property
    def fastest(self) -> Tried | None:
        """The fastest micro-batch that fits."""
        return self.largest and max(self.tried, key=lambda one: one.samples_per_second or 0.0)

    def describe(self) -> str:
        """Return it as the text that is shown."""
        title = f"batch-find: {self.task} with {self.device or 'nothing measured'}"
        on_device = any(one.device_bytes is not None for one in self.tried)
        lines = [
            f"{title}, {counted(self.workers, 'worker')}, global batch {self.global_batch}",
            f"  {'micro-batch':>11}  {'accumulate':>10}  {'samples/s':>11}  {'host':>11}"
            + (f"  {'GPU':>11}" if on_device else ""),
        ]
        for one in self.tried:
            row = f"  {one.size.micro_batch:>11}  {one.size.accumulate:>10}  {one.problem}"
            if one.samples_per_second is not None:
                row += f"{one.samples_per_second:>11,.1f}  {one.host_bytes / _MIB:>7,.0f} MiB"
                row += "" if one.device_bytes is None else f"  {one.device_bytes / _MIB:>7,.0f} MiB"
            lines.append(row + ("  the job as it is" if one.size == self.own else ""))
        lines.append(f"a host's workers may take {self.limit / _MIB:,.0f} MiB of memory")
        if self.largest is None:
            return "\n".join([*lines, "no micro-batch fits: use a smaller model, or more workers"])
        fastest = self.fastest or self.largest
        return "\n".join([
            *lines,
            f"largest that fits: {self.largest.size.options}",
            f"fastest:            {fastest.size.options}",
            "note: the curve is another one if the model computes something over a micro-batch, such as "
            "batch norm, or draws random numbers for it, such as dropout's",
        ])  # fmt: skip

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "version": VERSION,
            "task": self.task,
            "device": self.device,
            "workers": self.workers,
            "global_batch": self.global_batch,
            "limit_bytes": self.limit,
            "largest": self.largest and dict(self.largest.size.values),
            "fastest": self.fastest and dict(self.fastest.size.values),
            "tried": [
                {name: value for name, value in (vars(one.size) | vars(one)).items() if name != "size"}
                for one in self.tried
            ],
        }


_MODULE = "hvdtrain.tools.search.batch_find"
_MORE_SECONDS, _FACTOR = 300.0, 10.0  # in addition to the measurement: to start, and to compile
OUT_OF_MEMORY_CODE = 12  # ENOMEM
_KILLED = re.compile(rf"exit (code|status):? *(-9|137|{OUT_OF_MEMORY_CODE})\b|signal 9|SIGKILL|\bKilled\b")


def run_batch_find(layers: list[Layer], options: BatchOptions) -> None:
    """Find a micro-batch, show what was found, and write it where the options say."""
    check_may_be_elastic(None)
    check_is_not_launched("batch-find", "-np N ...")
    check_writable(options.json_path, layers=layers)
    with said_if_interrupted():
        found = find_sizes(layers, options)
    show_found(found.describe(), found.to_document(), options.json_path)


def find_sizes(layers: list[Layer], options: BatchOptions) -> BatchSizes:
    """Try the job as it is, then other micro-batches, the smallest first, up to one that lacks memory."""
    workers, tried, device, too_large = options.num_proc, list[Tried](), "", math.inf
    hosts = check_slots((workers,), options.hosts, may_share=False)
    hosts = hosts if options.hosts else f"localhost:{workers}"
    _, config = settle(layers)  # what is wrong is said before workers are started
    check(Job(config, command="batch-find"))
    own, limit = batch_size_of(config, workers), options.memory or free_bytes()
    of_worker = limit // min(workers, max(host.slots for host in parse_host_list(hosts)))
    launcher = horovodrun(workers, hosts, options.controller)
    limit_seconds = _FACTOR * options.seconds + _MORE_SECONDS
    with interruptible(), exchange_folder(shared=bool(options.hosts)) as folder:
        for size in (own, *(size for size in sizes_to_try(config, workers) if size != own)):
            if size.micro_batch >= too_large:
                tried.append(Tried(size, problem="not tried: a smaller one does not fit"))
                continue
            say(f"{'' if tried else 'the job as it is: '}{size.options} ...")
            changed = layers_to_json([*layers, Layer("batch-find", dict(size.values))])
            values = {"layers": changed, "limit": of_worker, "seconds": options.seconds}
            of_job = folder / str(len(tried))
            try:
                found = run_module("the job", launcher, _MODULE, values, of_job, limit_seconds)
                device = found.pop("device")
                tried.append(Tried(size, **found))
            except EnvironmentFault as error:
                failed = _failed(size, error, of_job / MARKER)
                if not tried and not failed.lacks_memory:
                    raise
                say(f"  {failed.problem}")
                tried.append(failed)
                too_large = size.micro_batch if failed.lacks_memory else too_large
    tried.sort(key=lambda one: one.size.micro_batch)
    global_batch = own.global_batch or own.micro_batch * own.accumulate * workers
    return BatchSizes(config.task, device, workers, own, global_batch, tried, limit)


def _failed(size: BatchSize, error: EnvironmentFault, marker: Path) -> Tried:
    """Return a micro-batch with which the job failed."""
    if marker.is_file():
        why = json.loads(marker.read_text(encoding="utf-8"))
        return Tried(size, problem=f"does not fit: {why}", lacks_memory=True)
    if _KILLED.search(f"{error.problem}\n{error.remedy}"):
        return Tried(size, problem="does not fit: a worker was killed", lacks_memory=True)
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
