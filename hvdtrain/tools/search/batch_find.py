"""Finding a micro-batch: each is tried by a job of its own, which may run out of memory."""

import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.config import Config, Layer
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.cores import free_bytes
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import check_is_not_launched
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.jobs.signals import interruptible
from hvdtrain.tools.launch import (
    check_slots,
    exchange_folder,
    horovodrun,
    layers_to_json,
    run_program,
)
from hvdtrain.tools.output import check_writable, config_files, said_if_interrupted, say, show_found
from hvdtrain.tools.search import batch_sizes
from hvdtrain.tools.search.batch_sizes import BatchSize, BatchSizes, Tried, curve_difference
from hvdtrain.tools.search.batch_worker import MARKER, OUT_OF_MEMORY_CODE
from hvdtrain.tools.search.options import BatchOptions

_MORE_SECONDS, _FACTOR = 300.0, 10.0  # beside the measurement: to start, and to compile
_KILLED = re.compile(rf"exit (code|status):? *(-9|137|{OUT_OF_MEMORY_CODE})\b|signal 9|SIGKILL|\bKilled\b")
_SAME_FP32, _SAME_ROUNDED = 1e-4, 2e-2  # relative, of the first losses


def run_batch_find(layers: list[Layer], options: BatchOptions) -> None:
    """Find a micro-batch, show what was found, and write it where the options say.

    Raises:
        UsageError: If a launcher started this process, or the job would be refused.
        EnvironmentFault: If the job fails as it is.
    """
    check_may_be_elastic(None)
    check_is_not_launched("batch-find", "-np N ...")
    check_writable(options.json_path, read=config_files(layers))
    with said_if_interrupted():
        found = find_sizes(layers, options)
    show_found(found.describe(), found.to_document(), options.json_path)


def find_sizes(layers: list[Layer], options: BatchOptions) -> BatchSizes:
    """Try micro-batches with the job's global batch, and return what was found.

    Raises:
        UsageError: If there are fewer cores or slots than workers, or the job would be refused.
        EnvironmentFault: If the job as it is fails, and not for its memory.
    """
    workers = options.num_proc
    hosts = check_slots((workers,), options.hosts, may_share=False)
    hosts = hosts if options.hosts else f"localhost:{workers}"
    _, config = settle(layers)  # what is wrong is said before workers are started
    check(Job(config, command="batch-find"))
    own, limit = batch_sizes.batch_size_of(config, workers), options.memory or free_bytes()
    here = max(host.slots for host in parse_host_list(hosts))
    with interruptible(), exchange_folder(shared=bool(options.hosts)) as folder:
        jobs = _Jobs(layers, config, options, hosts, folder, limit // min(here, workers))
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
    config: Config
    options: BatchOptions
    hosts: str
    folder: Path
    limit: int
    device: str = ""
    losses: list[float] = field(default_factory=list)  # of the first steps of the first that fits
    _runs: int = 0

    def run(self, size: BatchSize) -> Tried:
        """Run the job with a micro-batch.

        Raises:
            EnvironmentFault: If it is the first, the job as it is, and fails for another reason than memory.
        """
        self._runs += 1
        path, found = (self.folder / f"{name}-{self._runs}.json" for name in ("job", "found"))
        layers = layers_to_json([*self.layers, Layer("batch-find", dict(size.values))])
        values = {"layers": layers, "limit": self.limit, "seconds": self.options.seconds, "found": str(found)}
        path.write_text(json.dumps(values), encoding="utf-8")
        launcher = horovodrun(self.options.num_proc, self.hosts, self.options.controller)
        command = [*launcher, sys.executable, "-m", "hvdtrain.tools.search.batch_worker", str(path)]
        limit_seconds = _FACTOR * self.options.seconds + _MORE_SECONDS
        try:
            document = run_program("the job", command, limit_seconds, found)
        except EnvironmentFault as error:
            return self._failed(size, error, found.with_suffix(MARKER))
        self.device, losses = document.pop("device"), document.pop("losses")
        self.losses = self.losses or losses
        difference = curve_difference(losses, self.losses)
        rounds = self.config.precision != "fp32" or self.config.compression != "none"
        same = difference <= (_SAME_ROUNDED if rounds else _SAME_FP32)
        return Tried(size, **document, difference=difference, same_curve=same)

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
