"""Micro-batches of one global batch, and what was found of them: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config import Config
from hvdtrain.storage.text import counted

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

    def row(self) -> str:
        """Return it as a row of the table."""
        place = f"  {self.size.micro_batch:>11}  {self.size.accumulate:>10}"
        if self.samples_per_second is None:
            return f"{place}  {self.problem}"
        on_device = "" if self.device_bytes is None else f"  {self.device_bytes / _MIB:>7,.0f} MiB"
        return f"{place}  {self.samples_per_second:>11,.1f}  {self.host_bytes / _MIB:>7,.0f} MiB{on_device}"


@dataclass(frozen=True)
class BatchSizes:
    """What ``batch-find`` found."""

    task: str  # the task's name or path
    device: str  # what it was computed on; empty if nothing was measured
    workers: int  # number of workers
    own: BatchSize  # the job as it is
    tried: Sequence[Tried]  # what was tried, the smallest micro-batch first
    limit: int  # how much memory the workers of a host could take

    @property
    def global_batch(self) -> int:
        """Samples of a step, which all micro-batches have in common."""
        return self.own.global_batch or self.own.micro_batch * self.own.accumulate * self.workers

    @property
    def fitting(self) -> list[Tried]:
        """What was measured."""
        return [one for one in self.tried if one.samples_per_second is not None]

    @property
    def largest(self) -> Tried | None:
        """The largest micro-batch that fits."""
        return max(self.fitting, key=lambda one: one.size.micro_batch, default=None)

    @property
    def fastest(self) -> Tried | None:
        """The fastest micro-batch that fits."""
        return max(self.fitting, key=lambda one: one.samples_per_second or 0.0, default=None)

    def describe(self) -> str:
        """Return it as the text that is shown."""
        title = f"batch-find: {self.task} with {self.device or 'nothing measured'}"
        on_device = any(one.device_bytes is not None for one in self.tried)
        lines = [
            f"{title}, {counted(self.workers, 'worker')}, global batch {self.global_batch}",
            f"  {'micro-batch':>11}  {'accumulate':>10}  {'samples/s':>11}  {'host':>11}"
            + (f"  {'GPU':>11}" if on_device else ""),
            *(one.row() + ("  the job as it is" if one.size == self.own else "") for one in self.tried),
            f"a host's workers may take {self.limit / _MIB:,.0f} MiB of memory",
        ]
        if self.largest is None:
            return "\n".join([*lines, "no micro-batch fits: use a smaller model, or more workers"])
        lines.append(f"largest that fits: {self.largest.size.options}")
        if self.fastest is not None:
            lines.append(f"fastest:            {self.fastest.size.options}")
        lines.append(
            "note: the curve is another one if the model computes something over a micro-batch, such as "
            "batch norm, or draws random numbers for it, such as dropout's"
        )
        return "\n".join(lines)

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
