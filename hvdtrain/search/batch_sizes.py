"""Micro-batches of one global batch: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config import Config

_MOST = 8
_LEAST_RATIO = 1.5  # from one micro-batch to the next


@dataclass(frozen=True)
class BatchSize:
    """How a worker's part of a global batch is computed.

    Attributes:
        micro_batch: samples that a worker computes at once.
        accumulate: micro-batches per step.
        global_batch: samples per step, if the job states it; None if it states ``batch_size``.
    """

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


def batch_size_of(config: Config, workers: int) -> BatchSize:
    """Return the micro-batch of a job as it is."""
    if config.global_batch_size is None:
        return BatchSize(config.batch_size, config.accumulate)
    return _of_global(config.global_batch_size, config.accumulate, workers)


def sizes_to_try(config: Config, workers: int, most: int = _MOST) -> list[BatchSize]:
    """Return micro-batches with the job's global batch, the smallest first; the job's own is among them.

    If there are more than ``most``, the largest are taken.

    Args:
        config: the job's config.
        workers: number of workers.
        most: how many, at most.
    """
    own = batch_size_of(config, workers)
    if config.global_batch_size is None:
        samples = config.batch_size * config.accumulate
        counts = [count for count in range(1, samples + 1) if samples % count == 0]
        sizes = [BatchSize(samples // count, count) for count in counts]
    else:
        samples = config.global_batch_size // workers
        counts = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
        sizes = [_of_global(config.global_batch_size, count, workers) for count in counts]
    kept = _thinned(sizes, own)[:most]
    return sorted({*kept, own}, key=lambda size: size.micro_batch)


def _of_global(global_batch: int, accumulate: int, workers: int) -> BatchSize:
    return BatchSize(-(-global_batch // (workers * accumulate)), accumulate, global_batch)


def _thinned(sizes: Sequence[BatchSize], own: BatchSize) -> list[BatchSize]:
    """Return sizes, the largest first, without those that are close to a larger one."""
    kept: list[BatchSize] = []
    for size in sorted(sizes, key=lambda one: -one.micro_batch):
        if not kept or kept[-1].micro_batch >= _LEAST_RATIO * size.micro_batch or size == own:
            kept.append(size)
    return kept


def curve_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two curves at a step, relative to the larger loss of the two."""
    pairs = zip(losses, others, strict=False)
    return max((abs(one - other) / max(abs(one), abs(other), 1e-9) for one, other in pairs), default=0.0)
