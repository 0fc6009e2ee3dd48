"""What a search for a micro-batch found: a table, the options to type, a document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.search.batch_sizes import BatchSize
from hvdtrain.words import counted

VERSION = 1
_MIB = 2**20


@dataclass(frozen=True)
class Tried:
    """A micro-batch that was tried.

    Attributes:
        size: the micro-batch.
        samples_per_second: of all workers together; None if it did not fit.
        host_bytes: the most memory that the workers of a host took.
        device_bytes: the most memory that a worker took on its GPU; None on the CPU.
        difference: of the losses of the first steps from those of the first that ran, relative: of the job
            as it is, or, if that does not fit, of the smallest micro-batch.
        same_curve: whether that is rounding.
        problem: why it was not measured.
        lacks_memory: whether that is because memory did not suffice.
    """

    size: BatchSize
    samples_per_second: float | None = None
    host_bytes: int = 0
    device_bytes: int | None = None
    difference: float = 0.0
    same_curve: bool = True
    problem: str = ""
    lacks_memory: bool = False

    def row(self, own: BatchSize) -> str:
        """Return it as a row of the table."""
        place = f"  {self.size.micro_batch:>11}  {self.size.accumulate:>10}"
        mark = "  the job as it is" if self.size == own else ""
        if self.samples_per_second is None:
            return f"{place}  {self.problem}{mark}"
        on_device = "" if self.device_bytes is None else f"  {self.device_bytes / _MIB:>7,.0f} MiB"
        curve = f"same ({self.difference:.0e})" if self.same_curve else f"differs ({self.difference:.0e})"
        return (
            f"{place}  {self.samples_per_second:>11,.1f}  {self.host_bytes / _MIB:>7,.0f} MiB{on_device}  "
            f"{curve}{mark}"
        )


@dataclass(frozen=True)
class BatchSizes:
    """What ``batch-find`` found.

    Attributes:
        task: the task's name or path.
        device: what it was computed on, in words; empty if nothing was measured.
        workers: number of workers.
        global_batch: samples of a step, which all micro-batches have in common.
        own: the job as it is.
        tried: what was tried, the smallest micro-batch first.
        limit: how much memory the workers of a host could take.
    """

    task: str
    device: str
    workers: int
    global_batch: int
    own: BatchSize
    tried: Sequence[Tried]
    limit: int

    @property
    def fitting(self) -> list[Tried]:
        """What fits."""
        return [one for one in self.tried if one.samples_per_second is not None]

    @property
    def largest(self) -> Tried | None:
        """The largest micro-batch that fits."""
        return max(self.fitting, key=lambda one: one.size.micro_batch, default=None)

    @property
    def fastest(self) -> Tried | None:
        """The fastest micro-batch that fits and has the curve of the job as it is."""
        return _fastest([one for one in self.fitting if one.same_curve])

    def describe(self) -> str:
        """Return it as the text that is shown."""
        on_device = any(one.device_bytes is not None for one in self.tried)
        title = f"batch-find: {self.task} with {self.device or 'nothing measured'}"
        lines = [f"{title}, {counted(self.workers, 'worker')}, global batch {self.global_batch}"]
        columns = f"  {'micro-batch':>11}  {'accumulate':>10}  {'samples/s':>11}  {'host':>11}"
        lines.append(columns + (f"  {'GPU':>11}" if on_device else "") + "  curve")
        lines += [one.row(self.own) for one in self.tried]
        lines.append(f"a host's workers may take {self.limit / _MIB:,.0f} MiB of memory")
        largest, fastest, any_curve = self.largest, self.fastest, _fastest(self.fitting)
        if largest is None or any_curve is None:
            return "\n".join([*lines, "no micro-batch fits: use a smaller model, or more workers"])
        lines.append(f"largest that fits: {largest.size.options}")
        if fastest is not None:
            lines.append(f"fastest:            {fastest.size.options}{self._gain(fastest)}")
        if any_curve is not fastest:
            lines.append(f"fastest of all:     {any_curve.size.options}{self._gain(any_curve)}")
        if all(one.size != self.own for one in self.fitting):
            lines.append(
                "note: the job as it is was not measured: curves are compared with that of the smallest "
                "micro-batch that was"
            )
        if any(not one.same_curve for one in self.fitting):
            lines.append(
                "note: where the curve differs, the model computes something over a micro-batch, such as "
                "batch norm, or draws random numbers for it, such as dropout's"
            )
        return "\n".join(lines)

    def _gain(self, one: Tried) -> str:
        own = next((other for other in self.fitting if other.size == self.own), None)
        if own is None or one is own or not own.samples_per_second or not one.samples_per_second:
            return ""
        gain = one.samples_per_second / own.samples_per_second
        return f"  ({gain:.2f} times the samples/s of the job as it is)"

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        largest, fastest = self.largest, self.fastest
        return {
            "version": VERSION,
            "task": self.task,
            "device": self.device,
            "workers": self.workers,
            "global_batch": self.global_batch,
            "limit_bytes": self.limit,
            "largest": None if largest is None else dict(largest.size.values),
            "fastest": None if fastest is None else dict(fastest.size.values),
            "tried": [
                {
                    "micro_batch": one.size.micro_batch,
                    "accumulate": one.size.accumulate,
                    "samples_per_second": one.samples_per_second,
                    "host_bytes": one.host_bytes,
                    "device_bytes": one.device_bytes,
                    "difference": one.difference,
                    "same_curve": one.same_curve,
                    "problem": one.problem,
                }
                for one in self.tried
            ],
        }


def _fastest(tried: Sequence[Tried]) -> Tried | None:
    return max(tried, key=lambda one: one.samples_per_second or 0.0, default=None)
