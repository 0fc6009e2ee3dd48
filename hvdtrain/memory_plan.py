"""The memory that a job needs on each worker: what is known before it trains, and what makes it fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.compression import rank_of
from hvdtrain.config import Config

MEBIBYTE = 1 << 20
_NUMBER_BYTES = 4  # weights, gradients and slots are fp32
_SLOTS = {"adamw": 2, "lamb": 2}  # tensors that an optimizer keeps for each parameter
_LARGEST = 3  # tensors that a message names


@dataclass(frozen=True)
class MemoryPlan:
    """What a worker of a job keeps while it trains, in bytes; without activations, batches and the framework.

    Attributes:
        parts: bytes by what they are for.
        largest: the largest parameters, name and bytes.
        remedies: what would take less memory, the most effective first, in words.
    """

    parts: Mapping[str, int]
    largest: Sequence[tuple[str, int]]
    remedies: Sequence[str]

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Return the parts and their sum, in words."""
        parts = ", ".join(f"{name} {mebibytes(size)}" for name, size in self.parts.items() if size)
        return (
            f"{mebibytes(self.total_bytes)} per worker: {parts}; besides activations, batches and framework"
        )

    def describe_largest(self) -> str:
        """Return what the plan's parts and the largest parameters take, in words."""
        tensors = ", ".join(f"{name} ({mebibytes(size)})" for name, size in self.largest)
        return f"The model takes {self.describe()}. Its largest parameters: {tensors}."

    def exceeds(self, limit_bytes: int) -> str:
        """Return that the parts alone do not fit into a limit, in words; empty if they do."""
        if self.total_bytes <= limit_bytes:
            return ""
        return (
            f"parameters, gradients and optimizer take {mebibytes(self.total_bytes)} per worker, and each "
            f"worker of this host may take {mebibytes(limit_bytes)}"
        )


def memory_plan(
    parameter_shapes: Mapping[str, Sequence[int]],
    config: Config,
    *,
    frozen_parameters: int = 0,
    micro_batch: int,
    has_own_optimizer: bool = False,
    workers: int = 1,
    is_elastic: bool = False,
) -> MemoryPlan:
    """Return the memory that a worker needs beside activations, batches and the framework.

    Args:
        parameter_shapes: shapes of the trained parameters by name.
        config: the resolved config.
        frozen_parameters: how many numbers are not trained.
        micro_batch: samples of a worker's micro-batch.
        has_own_optimizer: whether the task brings an optimizer, whose slots are not known.
        workers: the number of workers, among which state may be sharded.
        is_elastic: whether the job is elastic.
    """
    sizes = {name: _NUMBER_BYTES * math.prod(shape) for name, shape in parameter_shapes.items()}
    trained = sum(sizes.values())
    parts = _parts(config, trained, workers)
    parts["parameters"] += _NUMBER_BYTES * frozen_parameters
    may_shard = workers > 1 and not is_elastic and not has_own_optimizer and config.sync_every is None
    if has_own_optimizer:
        parts["optimizer"] = 0
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
    remedies = _remedies(config, micro_batch, trained)
    if may_shard:
        remedies += _sharding(config, trained, workers)
    return MemoryPlan(parts, largest, remedies)


def mebibytes(size: int) -> str:
    """Return a number of bytes in words."""
    return f"{size / MEBIBYTE:,.1f} MiB" if size < 100 * MEBIBYTE else f"{size / MEBIBYTE:,.0f} MiB"


def _parts(config: Config, trained: int, workers: int) -> dict[str, int]:
    """Return what a worker keeps for trained parameters of so many bytes, by what it is for."""
    is_sharded = config.shard != "none" and workers > 1
    part = -(-trained // workers) if is_sharded else trained
    keeps_all_gradients = config.shard != "gradients" or not is_sharded or _adds_whole_gradients(config)
    return {
        "parameters": trained,
        "gradients": trained if keeps_all_gradients else part,
        "optimizer": _slots(config) * part,
        # Keras's optimizers update variables of their own
        "parts of parameters": part if is_sharded and config.framework == "tf" else 0,
        "moving average": part if config.ema_decay is not None else 0,
        "compression": _compression_bytes(config, trained),
    }


def _adds_whole_gradients(config: Config) -> bool:
    """Return whether micro-batches are added up before gradients are sent to their owners."""
    return config.framework == "tf" and config.accumulate > 1


def _sharding(config: Config, trained: int, workers: int) -> list[str]:
    """Return what sharding more would take less, in words."""
    now = sum(_parts(config, trained, workers).values())
    found = []
    for shard in ("optimizer", "gradients"):
        if rank_of(config.compression) is not None and shard == "gradients":
            continue
        less = now - sum(_parts(config.model_copy(update={"shard": shard}), trained, workers).values())
        if less > 0:
            found.append(f"--shard {shard}: {mebibytes(less)} less")
    return found


def _slots(config: Config) -> int:
    return _SLOTS.get(config.optimizer, 1 if config.momentum else 0)


def _compression_bytes(config: Config, trained: int) -> int:
    """Return what compressed gradients take: copies of half the size, or what low rank leaves out."""
    if rank_of(config.compression) is not None:
        return trained
    return trained // 2 if config.compression != "none" else 0


def _remedies(config: Config, micro_batch: int, trained: int) -> list[str]:
    """Return what would take less memory, as far as the config does not do it."""
    remedies = []
    if micro_batch > 1:
        smaller = "" if config.global_batch_size else f"--batch-size {-(-micro_batch // 2)} "
        remedies.append(
            f"{smaller}--accumulate {2 * config.accumulate}: micro-batches of half the size, with about half "
            "of the activations"
        )
    if not config.checkpoint_activations:
        remedies.append("--checkpoint-activations: those of repeated blocks are computed twice and not kept")
    if config.precision == "fp32":
        remedies.append("--precision bf16: most activations take half of it")
    if config.ema_decay is not None:
        remedies.append(f"no --ema-decay: {mebibytes(trained)} less")
    return remedies
