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
) -> MemoryPlan:
    """Return the memory that a worker needs beside activations, batches and the framework.

    Args:
        parameter_shapes: shapes of the trained parameters by name.
        config: the resolved config.
        frozen_parameters: how many numbers are not trained.
        micro_batch: samples of a worker's micro-batch.
        has_own_optimizer: whether the task brings an optimizer, whose slots are not known.
    """
    sizes = {name: _NUMBER_BYTES * math.prod(shape) for name, shape in parameter_shapes.items()}
    trained = sum(sizes.values())
    parts = {
        "parameters": trained + _NUMBER_BYTES * frozen_parameters,
        "gradients": trained,
        "optimizer": 0 if has_own_optimizer else _slots(config) * trained,
        "moving average": trained if config.ema_decay is not None else 0,
        "compression": _compression_bytes(config, trained),
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
    return MemoryPlan(parts, largest, _remedies(config, micro_batch, trained))


def mebibytes(size: int) -> str:
    """Return a number of bytes in words."""
    return f"{size / MEBIBYTE:,.1f} MiB" if size < 100 * MEBIBYTE else f"{size / MEBIBYTE:,.0f} MiB"


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
