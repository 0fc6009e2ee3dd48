"""What backends take and return: portable states, what is known of a model, the result of a dry run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from numpy.typing import NDArray

from hvdtrain.errors import TaskError

PortableState = dict[str, NDArray[Any]]
# a portable state, or a part of one, that is only read: an array may be fetched when it is requested
StateArrays = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]


class StatePart(Enum):
    """Which part of a portable state is loaded.

    Attributes:
        WEIGHTS: the model; the optimizer stays as it is, and a moving average starts from the weights.
        SOME_WEIGHTS: as ``WEIGHTS``, and arrays that are missing stay as rank 0 has them.
    """

    ALL = "all"
    WEIGHTS = "weights"
    SOME_WEIGHTS = "some weights"


@dataclass(frozen=True)
class BackendInfo:
    """What a backend knows when it has started."""

    description: str  # framework, version and device, such as "PyTorch 2.13.0 on the CPU"
    versions: Mapping[str, str]  # by name, what must be equal on all workers


@dataclass(frozen=True)
class OwnRates:
    """The learning rates of a task's own optimizer."""

    optimizer: str  # the name of its class
    base: float | None  # the largest rate of its parameter groups; None if it has none
    is_default: bool  # whether all groups have the rate that its constructor sets by default
    factors: tuple[float, ...] = (1.0,)  # what each group's rate is multiplied by, relative to the base


@dataclass(frozen=True)
class ModelInfo:
    """What a backend knows when it has built the model."""

    parameter_shapes: Mapping[str, tuple[int, ...]]  # shapes of the trainable parameters by portable name
    batch_norm_layers: int  # number of batch-norm layers
    reduction: str  # how gradients are reduced, for the plan
    own_rates: OwnRates | None = None  # the learning rates of the task's own optimizer, if it brings one
    notes: tuple[str, ...] = ()  # what the user should know of the model before training, as sentences
    groups: tuple[str, ...] = ()  # the parameter groups of the config, for the plan
    frozen_parameters: int = 0  # number of parameters, as numbers and not as tensors, that are not trained
    stages: tuple[str, ...] = ()  # what each stage of a split model has, for the plan
    # shapes of the trainable parameters of each stage; empty if the model is not split
    stage_shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    synchronized_layers: int = 0  # number of batch-norm layers that normalise over all workers
    slot_bytes: int = 0  # what the state of the task's own optimizers takes; 0 if that is not known
    float_bits: int = 32  # bits of the floating-point numbers that the model takes, 32 or 64
    leaves_out_padding: bool = False  # whether steps give the model no padding while there are samples


@dataclass(frozen=True)
class Exported:
    """The result of loading an export back."""

    # largest difference between outputs of the model and of what was loaded back; infinite where they do not
    # compare
    difference: float
    scale: float  # largest number in the output that differs most
    batch: str = ""  # the batch sizes and lengths that it takes, as text; empty where it holds weights only
    # the program's inputs, each with its type and shape; none where it holds weights only
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # its outputs, likewise
    arguments: tuple[str, ...] = ()  # names of the inputs
    is_plain: bool = True  # whether it is called with one tensor, without its name
    checked: str = ""  # on what it was compared, as text
    notes: tuple[str, ...] = ()  # what else to report to the user

    @property
    def relative(self) -> float:
        """The difference relative to the output's largest number."""
        return self.difference / self.scale if self.difference else 0.0

    def joined(self, other: "Exported") -> "Exported":
        """Return the worse of two comparisons of one model."""
        return max(self, other, key=lambda one: one.relative)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a worker's GPU, in bytes."""

    peak: int  # the most that tensors have had
    limit: int | None = None  # how much it has; None if that is not known


@dataclass(frozen=True)
class DryRun:
    """The result of one micro-batch that was computed without changing anything."""

    # what the model's last call returned, with arrays in place of tensors; None if the model was not called
    # or its outputs cannot be read
    outputs: Any
    # name to array (samples,); "loss" and the task's metrics. Empty after an error
    values: Mapping[str, NDArray[Any]]
    last_activation: str = ""  # "softmax" or "sigmoid" if the model's last layer computes it; empty otherwise
    error: Exception | None = None  # the exception that ended the computation, or None
    note: str = ""  # what the user should know of the computation, as a sentence; empty if nothing
    # checksums, by portable name, of the state that it changed before it was put back
    changed: Mapping[str, int] = field(default_factory=dict)
    # what makes the model one that cannot be trained as it is, though nothing failed
    refusal: TaskError | None = None
    changed_inputs: tuple[str, ...] = ()  # names of the arrays that it changed in place
    # names of those values that have weights of their own, as a mean of the batch has
    weighted: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # those of a whole evaluation, of this batch
