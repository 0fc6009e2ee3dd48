"""What backends take and return: portable states, what is known of a model, the result of a dry run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from numpy.typing import NDArray

from hvdtrain.errors import TaskError

PortableState = dict[str, NDArray[Any]]
# a portable state, or a part of one, that is only read: an array may be fetched when it is asked for
StateArrays = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]


class StatePart(Enum):
    """Which part of a portable state is loaded.

    Attributes:
        ALL: model and optimizer.
        WEIGHTS: the model; the optimizer stays as it is, and a moving average starts from the weights.
        SOME_WEIGHTS: as ``WEIGHTS``, and arrays that are missing stay as rank 0 has them.
    """

    ALL = "all"
    WEIGHTS = "weights"
    SOME_WEIGHTS = "some weights"


@dataclass(frozen=True)
class BackendInfo:
    """What a backend knows when it has started.

    Attributes:
        description: framework, version and device, such as "PyTorch 2.13.0 on the CPU".
        versions: by name, what must be equal on all workers.
    """

    description: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class OwnRates:
    """The learning rates of a task's own optimizer.

    Attributes:
        optimizer: the name of its class.
        base: the largest rate of its parameter groups; None if it has none.
        is_default: whether all groups have the rate that its constructor sets by default.
        factors: what each group's rate is multiplied by, relative to the base.
    """

    optimizer: str
    base: float | None
    is_default: bool
    factors: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class ModelInfo:
    """What a backend knows when it has built the model.

    Attributes:
        parameter_shapes: shapes of the trainable parameters by portable name.
        batch_norm_layers: number of batch-norm layers.
        reduction: how gradients are reduced, for the plan.
        own_rates: the learning rates of the task's own optimizer, if it brings one.
        notes: what the user should know of the model before training, as sentences.
        frozen_parameters: number of parameters, as numbers and not as tensors, that are not trained.
        groups: the parameter groups of the config, for the plan.
        stages: what each stage of a split model has, for the plan.
        stage_shapes: shapes of the trainable parameters of each stage; empty if the model is not split.
        stage_cuts: the first block of each stage but the first.
        slot_bytes: what the state of the task's own optimizers takes; 0 if that is not known.
        synchronized_layers: number of batch-norm layers that normalise over all workers.
        float_bits: bits of the floating-point numbers that the model takes, 32 or 64.
        leaves_out_padding: whether steps give the model no padding while there are samples.
    """

    parameter_shapes: Mapping[str, tuple[int, ...]]
    batch_norm_layers: int
    reduction: str
    own_rates: OwnRates | None = None
    notes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    frozen_parameters: int = 0
    stages: tuple[str, ...] = ()
    stage_shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    stage_cuts: tuple[int, ...] = ()
    synchronized_layers: int = 0
    slot_bytes: int = 0
    float_bits: int = 32
    leaves_out_padding: bool = False


@dataclass(frozen=True)
class Exported:
    """What came of an export that was loaded back.

    Attributes:
        difference: largest difference between outputs of the model and of what was loaded back;
            infinite where they do not compare.
        scale: largest number in the output that differs most.
        batch: the batch sizes and lengths that it takes, in words; empty where it holds weights only.
        inputs: the program's inputs, each with its type and shape; none where it holds weights only.
        outputs: its outputs, likewise.
        arguments: names of the inputs.
        is_plain: whether it is called with one tensor, without its name.
        checked: on what it was compared, in words.
        notes: what else to tell the user.
    """

    difference: float
    scale: float
    batch: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    is_plain: bool = True
    checked: str = ""
    notes: tuple[str, ...] = ()

    @property
    def relative(self) -> float:
        """The difference relative to the output's largest number."""
        return self.difference / self.scale if self.difference else 0.0

    def joined(self, other: "Exported") -> "Exported":
        """Return the worse of two comparisons of one model."""
        return max(self, other, key=lambda one: one.relative)


@dataclass(frozen=True)
class StepMemory:
    """What the forward and the backward pass of a micro-batch take of memory, in bytes.

    Attributes:
        activations: the most that tensors take at once which the passes make, without the gradients of
            parameters: what the backward pass needs of the forward pass, and what both need meanwhile.
        compiling: roughly, what the framework takes in addition to tensors when it compiles the step.
        idle: what the framework keeps of freed memory for tensors that are made later.
        largest: the largest tensors that the passes make: what they are and how many, and bytes of each.
    """

    activations: int
    compiling: int = 0
    idle: int = 0
    largest: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a worker's GPU, in bytes.

    Attributes:
        peak: the most that tensors have had.
        limit: how much it has; None if that is not known.
    """

    peak: int
    limit: int | None = None


@dataclass(frozen=True)
class DryRun:
    """What came of one micro-batch that was computed without changing anything.

    Attributes:
        outputs: what the model's last call returned, with arrays in place of tensors; None if the model
            was not called or its outputs cannot be read.
        values: name to array (samples,); "loss" and the task's metrics. Empty after an error.
        last_activation: "softmax" or "sigmoid" if the model's last layer computes it; empty otherwise.
        error: the exception that ended the computation, or None.
        note: what the user should know of the computation, as a sentence; empty if nothing.
        memory: what it took of memory in training; None if that is not known, as in a step of the task's own.
            After an error, it has the largest tensors alone.
        changed: checksums, by portable name, of the state that it changed before it was put back.
        refusal: what makes the model one that cannot be trained as it is, though nothing failed.
        changed_inputs: names of the arrays that it changed in place.
        weighted: names of those values that have weights of their own, as a mean of the batch has.
    """

    outputs: Any
    values: Mapping[str, NDArray[Any]]
    last_activation: str = ""
    error: Exception | None = None
    note: str = ""
    memory: StepMemory | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    refusal: TaskError | None = None
    changed_inputs: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()
