"""The memory that a job needs on each worker: what is known before it trains, and what makes it fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
    trained, compression = sum(sizes.values()), compression_of(config.compression)
    is_sharded = config.shard != "none" and workers > 1
    part = -(-trained // workers) if is_sharded else trained
    keeps_all_gradients = config.shard != "gradients" or not is_sharded or config.framework == "tf"
    slots = _SLOTS.get(config.optimizer, 1 if config.momentum else 0) * part
    half = trained * compression.number_bytes // 4 if config.compression != "none" else 0
    parts = {
        "parameters": trained + _NUMBER_BYTES * frozen_parameters,
        "gradients": trained if keeps_all_gradients else part,
        "optimizer": slots if own_slots is None else own_slots,
        # Keras's optimizers update variables of their own
        "parts of parameters": part if is_sharded and config.framework == "tf" else 0,
        "moving average": part if config.ema_decay is not None else 0,
        # what low rank leaves out, or copies of half the size
        "compression": trained if compression.keeps else half,
    }
    is_alone = workers == 1 or is_elastic or config.stages > 1
    may_divide = not (is_alone or own_slots is not None or config.sync_every is not None)
    remedies = list(_remedies(config, micro_batch, workers if may_divide else 1))
    return MemoryPlan(parts, sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST], remedies)


def mebibytes(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / MEBIBYTE:,.1f} MiB" if size < 100 * MEBIBYTE else f"{size / MEBIBYTE:,.0f} MiB"


def _remedies(config: Config, micro_batch: int, workers: int) -> Iterator[str]:
    """Yield what would take less memory, as far as the config does not do it; workers may divide it."""
    if micro_batch > 1:
        smaller = "" if config.global_batch_size else f"--batch-size {-(-micro_batch // 2)} "
        yield (
            f"{smaller}--accumulate {2 * config.accumulate}: micro-batches of half the size, with about half "
            "of the activations"
        )
    if not config.checkpoint_activations:
        yield "--checkpoint-activations: those of repeated blocks are computed anew, and not kept"
    if config.precision == "fp32":
        yield "--precision bf16: most activations take half of it"
    if config.ema_decay is not None:
        yield "no --ema-decay: the weights once less"
    if workers == 1:
        return
    may_shard = config.optimizer not in ("lars", "lamb")
    if config.shard == "none" and may_shard:
        yield "--shard optimizer: each worker keeps its part of the optimizer's state"
    keeps_parts = compression_of(config.compression).parts_as and config.framework != "tf"
    if config.shard != "gradients" and keeps_parts and may_shard:
        yield "--shard gradients: and of the gradients"
    if config.shard == "none" and config.compression in ("none", "fp16"):
        yield f"--stages {workers}: each worker keeps some of the model's blocks"
