"""The memory that a job needs on each worker: what is known before it trains, and what makes it fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.config import Config
from hvdtrain.config.values import compression_of
from hvdtrain.workers.wire_types import travels

MEBIBYTE = 1 << 20


_NUMBER_BYTES = 4  # weights, gradients and slots are fp32
_SLOTS = {"adamw": 2, "lamb": 2}  # tensors that an optimizer keeps for each parameter
_LARGEST = 3  # tensors that a message names


@travels
@dataclass(frozen=True)
class MemoryPlan:
    """What a worker of a job keeps while it trains, in bytes."""

    parts: Mapping[str, int]  # bytes by what they are for; without activations, batches and the framework
    largest: Sequence[tuple[str, int]]  # the largest parameters, name and bytes
    remedies: Sequence[str]  # what would take less memory, the most effective first, as text
    stage: int = 0  # the stage of a split model, from 1, whose worker it is; 0 if the model is not split
    # the most that the worker, or tensors on its GPU, have had with the dry run; 0 before that
    taken: int = 0

    @property
    def total_bytes(self) -> int:
        """What the worker needs at least: the sum of the parts, or what it has had already."""
        return max(sum(self.parts.values()), self.taken)

    def describe(self) -> str:
        """Return the parts and their sum, as text."""
        parts = ", ".join(f"{name} {mebibytes(size)}" for name, size in self.parts.items() if size)
        whose = f"on a worker of stage {self.stage}, which takes most" if self.stage else "per worker"
        rest = "besides activations, batches and framework"
        if self.taken:
            rest = f"{mebibytes(self.taken)} were taken until now, with the dry run"
        return f"at least {mebibytes(self.total_bytes)} {whose}: {parts}; {rest}"

    def describe_largest(self) -> str:
        """Return what the plan's parts and the largest parameters take, as text."""
        largest = ", ".join(f"{name} ({mebibytes(size)})" for name, size in self.largest)
        return f"The job takes {self.describe()}. Its largest parameters: {largest}."


def memory_plan(
    parameter_shapes: Mapping[str, Sequence[int]],
    config: Config,
    *,
    frozen_parameters: int = 0,
    micro_batch: int,
    own_slots: int | None = None,
    workers: int = 1,
    is_elastic: bool = False,
) -> MemoryPlan:
    """Return the memory that a worker needs, without activations and the like."""
    sizes = {name: _NUMBER_BYTES * math.prod(shape) for name, shape in parameter_shapes.items()}
    trained = sum(sizes.values())
    parts = _parts(config, trained, workers)
    parts["parameters"] += _NUMBER_BYTES * frozen_parameters
    is_alone = workers == 1 or is_elastic or config.stages > 1
    may_divide = not (is_alone or own_slots is not None or config.sync_every is not None)
    if own_slots is not None:
        parts["optimizer"] = own_slots
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
    remedies = _remedies(config, micro_batch, trained)
    if may_divide:
        remedies += [*_sharding(config, trained, workers), *_splitting(config, trained, workers)]
    return MemoryPlan(parts, largest, remedies)


def mebibytes(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / MEBIBYTE:,.1f} MiB" if size < 100 * MEBIBYTE else f"{size / MEBIBYTE:,.0f} MiB"


def _parts(config: Config, trained: int, workers: int) -> dict[str, int]:
    """Return what a worker keeps for trained parameters of so many bytes, by what it is for."""
    is_sharded = config.shard != "none" and workers > 1
    part = -(-trained // workers) if is_sharded else trained
    keeps_all_gradients = config.shard != "gradients" or not is_sharded or config.framework == "tf"
    return {
        "parameters": trained,
        "gradients": trained if keeps_all_gradients else part,
        "optimizer": _slots(config) * part,
        # Keras's optimizers update variables of their own
        "parts of parameters": part if is_sharded and config.framework == "tf" else 0,
        "moving average": part if config.ema_decay is not None else 0,
        "compression": _compression_bytes(config, trained),
    }


def _sharding(config: Config, trained: int, workers: int) -> list[str]:
    """Return what sharding more would take less, as text."""
    now = sum(_parts(config, trained, workers).values())
    found = []
    for shard in ("optimizer", "gradients"):
        if shard == "gradients" and not compression_of(config.compression).parts_as:
            continue
        less = now - sum(_parts(config.model_copy(update={"shard": shard}), trained, workers).values())
        if less > 0:
            found.append(f"--shard {shard}: {mebibytes(less)} less")
    return found


def _splitting(config: Config, trained: int, workers: int) -> list[str]:
    """Return what splitting the model into a stage for each worker would take less, as text."""
    if config.shard != "none" or config.compression not in ("none", "fp16"):
        return []
    less = sum(_parts(config, trained, workers).values()) * (workers - 1) // workers
    return [f"--stages {workers}: about {mebibytes(less)} less, if the model's blocks can be divided evenly"]


def _slots(config: Config) -> int:
    return _SLOTS.get(config.optimizer, 1 if config.momentum else 0)


def _compression_bytes(config: Config, trained: int) -> int:
    """Return what compressed gradients take: copies of half the size, or what low rank leaves out."""
    row = compression_of(config.compression)
    if row.keeps:
        return trained
    return trained * row.number_bytes // 4 if config.compression != "none" else 0


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
        remedies.append("--checkpoint-activations: those of repeated blocks are computed anew, and not kept")
    if config.precision == "fp32":
        remedies.append("--precision bf16: most activations take half of it")
    if config.ema_decay is not None:
        remedies.append(f"no --ema-decay: {mebibytes(trained)} less")
    return remedies
