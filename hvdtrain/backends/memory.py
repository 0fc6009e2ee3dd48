"""The memory that a job needs on each worker: what is known before it trains, and what makes it fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.backends.reduction import shards
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of
from hvdtrain.workers.wire_types import travels

MEBIBYTE = 1 << 20


_NUMBER_BYTES = 4  # weights, gradients and slots are fp32
_SLOTS = {"adamw": 2, "lamb": 2}  # tensors that an optimizer keeps for each parameter
_SHOWN = MEBIBYTE // 20  # what takes less is 0.0 MiB
_LARGEST = 3  # tensors that a message names
_MADE_BY_STEPS = ("gradients", "compression")  # what is not there when the model is built


@travels
@dataclass(frozen=True)
class MeasuredMemory:
    """What a worker has measured before its first step, in bytes."""

    activations: int  # what the passes of a micro-batch take at once, without gradients
    per_sample: float  # how much of that each sample of the micro-batch adds
    # what the process has when the model is built; None if tensors are in a GPU's memory
    resident: int | None
    peak: int = 0  # the most that the process, or tensors on its GPU, have had until now
    workspace: int = 0  # what the passes took beyond activations and gradients, such as kernels' own memory
    batches: int = 0  # what batches take that are read ahead
    saving: int = 0  # what a checkpoint takes while it is written
    # whether that is in pages of a temporary file, which the system can take back
    saves_in_file: bool = False
    exchange: int = 0  # what the exchange between workers takes in addition to the gradients


@travels
@dataclass(frozen=True)
class MemoryPlan:
    """What a worker of a job keeps while it trains, in bytes."""

    # bytes by what they are for; before anything is measured without activations, batches and the framework
    parts: Mapping[str, int]
    largest: Sequence[tuple[str, int]]  # the largest parameters, name and bytes
    remedies: Sequence[str]  # what would take less memory, the most effective first, as text
    trained_bytes: int = 0  # what the trained parameters take
    # what a worker of the job cannot do without, if it is known and more than this one's
    most_needed: int = 0
    measured: MeasuredMemory | None = None  # what was measured; None before that
    stage: int = 0  # the stage of a split model, from 1, whose worker it is; 0 if the model is not split

    @property
    def needed_bytes(self) -> int:
        """What the worker cannot do without: not the pages of a file, which the system takes back."""
        if self.measured is None:
            return max(self.most_needed, sum(self.parts.values()))
        in_file = self.parts.get("saving", 0) if self.measured.saves_in_file else 0
        return max(self.most_needed, sum(self.parts.values()) - in_file, self.measured.peak)

    @property
    def total_bytes(self) -> int:
        """The sum of the parts, or what the worker has had already if that is more."""
        return max(sum(self.parts.values()), self.measured.peak if self.measured else 0)

    def with_measured(self, measured: MeasuredMemory, remedies: Sequence[str]) -> "MemoryPlan":
        """Return the plan with what was measured among its parts."""
        parts = dict(self.parts)
        if measured.resident is not None:
            there = sum(size for name, size in parts.items() if name not in _MADE_BY_STEPS)
            parts["framework and data"] = max(0, measured.resident - there)
        parts["activations"] = measured.activations
        parts["kernels"] = measured.workspace
        if measured.resident is not None:
            parts |= {"exchange": measured.exchange, "batches": measured.batches, "saving": measured.saving}
        return replace(self, parts=parts, remedies=remedies, measured=measured)

    def describe(self) -> str:
        """Return the parts and their sum, as text."""
        least = 1 if self.measured is None else _SHOWN
        sizes = {name: mebibytes(size) for name, size in self.parts.items() if size >= least}
        if self.measured is None:
            rest = "; besides activations, batches and framework"
        else:
            sizes["activations"] = f"{mebibytes(self.measured.activations)} ({self._per_sample()})"
            rest = "; besides the framework, on the GPU" if self.measured.resident is None else ""
            if self.measured.peak > sum(self.parts.values()):
                rest += f"; {mebibytes(self.measured.peak)} were taken until now"
        if self.measured and self.measured.saves_in_file and "saving" in sizes:
            sizes["saving"] += " in pages of a file"
        parts = ", ".join(f"{name} {size}" for name, size in sizes.items())
        whose = f"on a worker of stage {self.stage}, which takes most" if self.stage else "per worker"
        return f"{mebibytes(self.total_bytes)} {whose}: {parts}{rest}"

    def _per_sample(self) -> str:
        size = 0.0 if self.measured is None else self.measured.per_sample
        return f"{size / 1024:,.0f} KiB a sample" if size < MEBIBYTE else f"{mebibytes(round(size))} a sample"

    def describe_largest(self) -> str:
        """Return what the plan's parts and the largest parameters take, as text."""
        largest = ", ".join(f"{name} ({mebibytes(size)})" for name, size in self.largest)
        return f"The job takes {self.describe()}. Its largest parameters: {largest}."

    def exceeds(self, limit_bytes: int) -> str:
        """Return that the parts alone do not fit into a limit, as text; empty if they do."""
        if self.needed_bytes <= limit_bytes:
            return ""
        what = "parameters, gradients and optimizer take" if self.measured is None else "the job needs about"
        on_device = self.measured is not None and self.measured.resident is None
        whose = "its GPU has" if on_device else "each worker of this host may take"
        return f"{what} {mebibytes(self.needed_bytes)} per worker, and {whose} {mebibytes(limit_bytes)}"


def memory_plan(
    parameter_shapes: Mapping[str, Sequence[int]],
    config: Config,
    *,
    frozen_parameters: int = 0,
    micro_batch: int,
    own_slots: int | None = None,
    workers: int = 1,
    is_elastic: bool = False,
    measured: MeasuredMemory | None = None,
) -> MemoryPlan:
    """Return the memory that a worker needs; without activations and the like before they are measured."""
    sizes = {name: _NUMBER_BYTES * math.prod(shape) for name, shape in parameter_shapes.items()}
    trained = sum(sizes.values())
    parts = _parts(config, trained, workers)
    parts["parameters"] += _NUMBER_BYTES * frozen_parameters
    is_alone = workers == 1 or is_elastic or config.stages > 1
    may_divide = not (is_alone or own_slots is not None or config.sync_every is not None)
    if own_slots is not None:
        parts["optimizer"] = own_slots
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
    remedies = _remedies(config, micro_batch, trained, measured)
    if may_divide:
        remedies += [*_sharding(config, trained, workers), *_splitting(config, trained, workers)]
    plan = MemoryPlan(parts, largest, remedies, trained)
    return plan if measured is None else plan.with_measured(measured, remedies)


def saving_bytes(plan: MemoryPlan, config: Config) -> int:
    """Return what saving a checkpoint takes on rank 0, in PyTorch: copies of all state."""
    # matrices are laid out anew, so the larger file takes its size once more, but for split models
    parameters, has_average = plan.parts["parameters"], config.ema_decay is not None
    state = plan.trained_bytes * (has_average + (_slots(config) if plan.parts["optimizer"] else 0))
    return parameters + state + (max(parameters, state) if config.stages == 1 else 0)


def exchange_bytes(plan: MemoryPlan, config: Config, workers: int) -> int:
    """Return what the exchange takes in addition to the gradients: what joins some of them, and its sum."""
    if workers == 1:
        return 0
    whole = plan.trained_bytes
    joined = min(whole, 2 * shards.BUCKET_BYTES) if config.compression == "none" else whole
    return joined if config.shard == "none" else joined + min(whole, shards.PART_BYTES)


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


def _remedies(
    config: Config, micro_batch: int, trained: int, measured: MeasuredMemory | None = None
) -> list[str]:
    """Return what would take less memory, as far as the config does not do it."""
    remedies = []
    if micro_batch > 1:
        half = -(-micro_batch // 2)
        smaller = "" if config.global_batch_size else f"--batch-size {half} "
        less = "with about half of the activations"
        if measured is not None:
            less = f"{mebibytes(round((micro_batch - half) * measured.per_sample))} less"
        remedies.append(
            f"{smaller}--accumulate {2 * config.accumulate}: micro-batches of half the size, {less}"
        )
    if not config.checkpoint_activations:
        most = "" if measured is None else f", at most {mebibytes(measured.activations)} less"
        remedies.append(
            f"--checkpoint-activations: those of repeated blocks are computed anew, and not kept{most}"
        )
    if config.precision == "fp32":
        about = "" if measured is None else f", up to {mebibytes(measured.activations // 2)} less"
        remedies.append(f"--precision bf16: most activations take half of it{about}")
    if config.ema_decay is not None:
        remedies.append(f"no --ema-decay: {mebibytes(trained)} less")
    return remedies
