"""What one framework does with a task's model, in arrays that can be compared with the other's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.records import PortableState
from hvdtrain.workers.wire_types import travels

Array = NDArray[Any]
_TINY = 1e-300


@dataclass(frozen=True)
class Difference:
    """How far apart two arrays are."""

    absolute: float  # the largest difference of two numbers
    relative: float  # that, relative to the largest number


def difference(one: Array, other: Array, scale: float = 0.0) -> Difference:
    """Return how far apart two arrays of one shape are; numbers that are NaN or infinite in both are equal.

    Args:
        one: an array.
        other: another one.
        scale: a number that the difference is compared with if no number of the arrays is as large.
    """
    left, right = one.astype(np.float64), other.astype(np.float64)
    if not left.size:
        return Difference(0.0, 0.0)
    with np.errstate(all="ignore"):
        apart = np.abs(left - right)
    apart[(left == right) | (np.isnan(left) & np.isnan(right))] = 0.0
    absolute = float(apart.max())
    if not np.isfinite(absolute):
        return Difference(float("inf"), float("inf"))
    finite = np.abs(np.concatenate([left.ravel(), right.ravel()]))
    largest = float(finite[np.isfinite(finite)].max(initial=0.0))
    return Difference(absolute, absolute / max(largest, scale, _TINY))


def aligned(
    left: Array | None, right: Array | None, left_first: bool = False, right_first: bool = False
) -> tuple[Array, Array] | None:
    """Return two arrays in one layout, the second one's; None if their shapes do not allow it.

    Args:
        left: PyTorch's.
        right: TensorFlow's.
        left_first: whether the second axis of PyTorch's is known to be that of channels.
        right_first: the same of TensorFlow's.
    """
    if left is None or right is None:
        return None
    if right_first and right.ndim > 2:
        right = np.moveaxis(right, 1, -1)
    candidates = [one for one in _layouts(left, left_first) if one.shape == right.shape]
    if not candidates:
        return None
    return min(candidates, key=lambda one: difference(one, right).absolute), right


def _layouts(array: Array, channels_first: bool) -> Iterator[Array]:
    """Yield the layouts in which the other framework may have an array."""
    if array.ndim <= 2:
        yield array
        return
    yield np.moveaxis(array, 1, -1)
    if not channels_first:
        yield array
        yield np.swapaxes(array, 0, 1)  # time before samples


@travels
@dataclass(frozen=True)
class LayerCall:
    """One call of a layer in a forward pass."""

    path: str  # the layer's portable path; empty for the model itself
    kind: str  # its class
    settings: dict[str, Any]  # what it was made with, under names that both frameworks share
    inputs: Array | None = None  # its first input; None if that is no tensor
    outputs: Array | None = None  # its first output
    # the output before the activation that the layer itself applies, if it has one
    before_activation: Array | None = None
    channels_first: bool = False  # whether the second axis of its arrays is that of channels


@travels
@dataclass(frozen=True)
class ForwardPass:
    """A forward pass in evaluation, with the loss."""

    calls: tuple[LayerCall, ...]  # the layers' calls in the order in which they ended
    # the model's outputs, the first of several; None if the loss does not call the model
    outputs: Array | None
    losses: Array  # the loss of each sample
    more_outputs: tuple[Array, ...] = ()  # the model's other outputs


class CallRecorder:
    """Keeps the calls of a model's layers, within its context.

    Args:
        model: the model.
        paths: portable path of each layer, by its identity.

    Attributes:
        calls: the calls in the order in which they ended.
        outputs: all outputs of the model itself.
    """

    def __init__(self, model: Any, paths: Mapping[int, str]) -> None:
        self.calls: list[LayerCall] = []
        self.outputs: tuple[Array, ...] = ()
        self._model, self._paths = model, paths

    def forward_pass(self, losses: Array) -> ForwardPass:
        """Return the forward pass that was recorded, with the losses that it led to."""
        calls = tuple(call for call in self.calls if call.path)
        first = next(iter(self.outputs), None)
        return ForwardPass(calls, first, np.atleast_1d(losses), self.outputs[1:])


@travels
@dataclass(frozen=True)
class Observation:
    """What one framework does with a task's model."""

    framework: str  # "torch" or "tf"
    initial: PortableState  # the arrays that it begins with by itself
    own: PortableState  # those of the models' own initializers, if training would begin with them
    forward: ForwardPass  # a forward pass with the first batch
    random_layers: tuple[str, ...] = ()  # whose outputs differ between two evaluations with equal inputs
    is_random_in_training: bool = False  # whether the loss does in training, without dropout
    dropout_rates: tuple[float, ...] = ()  # rates of the dropout layers, which are off in the steps
    losses: Mapping[int, float] = field(default_factory=dict)  # of steps, from 1
    arrays: Mapping[int, PortableState] = field(default_factory=dict)  # the model's after steps
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # its settings, by names that both share
    batches: Sequence[int] = ()  # a digest of each batch
    trained: Sequence[str] = ()  # names of the parameters that training changes
    note: str = ""  # why it does not compute in fp64; empty if it does
