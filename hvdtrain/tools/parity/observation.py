"""What a framework does with a task's model, and the layers of both frameworks side by side."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.records import PortableState
from hvdtrain.workers.wire_types import travels

Array = NDArray[Any]
OUTPUTS = "(outputs)"  # the path of the model's outputs
MOMENTUM = "momentum convention"  # of batch norm
LEAST = 1e-6  # a relative difference that is smaller is none


@dataclass(frozen=True)
class Difference:
    """How far apart two arrays are."""

    absolute: float  # the largest difference of two numbers
    relative: float  # that, relative to the largest number


def difference(one: Array, other: Array) -> Difference:
    """Return how far apart two arrays of one shape are; NaN equals NaN, and infinite numbers themselves."""
    left, right = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(all="ignore"):
        apart = np.abs(left - right)
    apart[(left == right) | (np.isnan(left) & np.isnan(right))] = 0.0
    absolute = float(apart.max(initial=0.0))
    if not np.isfinite(absolute):
        return Difference(float("inf"), float("inf"))
    numbers = np.abs(np.concatenate([left.ravel(), right.ravel()]))
    return Difference(absolute, absolute / float(numbers[np.isfinite(numbers)].max(initial=1e-300)))


def constant_factor(left: Array, right: Array) -> float | None:
    """Return what the second array is multiplied by in the first; None if it is no constant other than 1."""
    x, y = left.ravel().astype(np.float64), right.ravel().astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not y.any() or not x.any():
        return None
    factor = float(x @ y / (y @ y))
    fits = difference(x, factor * y).relative < LEAST
    return factor if fits and abs(factor - 1) > LEAST else None


def aligned(left: Array | None, right: Array | None) -> tuple[Array, Array] | None:
    """Return PyTorch's and TensorFlow's array in TensorFlow's layout; None if no layout fits."""
    if left is None or right is None:
        return None
    layouts = [left]
    if left.ndim > 2:  # channels may be the second axis, and time may be before samples
        layouts = [np.moveaxis(left, 1, -1), left, np.swapaxes(left, 0, 1)]
    layouts = [one for one in layouts if one.shape == right.shape]
    return (min(layouts, key=lambda one: difference(one, right).absolute), right) if layouts else None


@travels
@dataclass(frozen=True)
class LayerCall:
    """One call of a layer in a forward pass."""

    path: str  # the layer's portable path; empty for the model itself
    kind: str  # its class
    inputs: Array | None = None  # its first input; None if that is no tensor
    outputs: Array | None = None  # its first output
    settings: Mapping[str, float] = field(default_factory=dict)  # under names that both frameworks share
    before_activation: Array | None = None  # the output before the activation that the layer itself applies


@travels
@dataclass(frozen=True)
class ForwardPass:
    """A forward pass in evaluation, with the loss of each sample."""

    calls: tuple[LayerCall, ...]  # the layers' calls in the order in which they ended
    outputs: tuple[Array, ...]  # the model's; none if the loss does not call the model
    losses: Array


class CallRecorder:
    """Keeps the calls of a model's layers, within its context; ``paths`` are portable ones by identity."""

    def __init__(self, model: Any, paths: Mapping[int, str]) -> None:
        self.calls: list[LayerCall] = []
        self.outputs: tuple[Array, ...] = ()
        self._model, self._paths = model, paths

    def _keep(self, layer: Any, inputs: Any, outputs: Iterable[Array], *more: Any) -> None:
        """Keep a call; ``more`` are its settings, and the output before the activation that it applies."""
        found = tuple(outputs)
        if layer is self._model and not self.outputs:
            self.outputs = found
        if path := self._paths.get(id(layer), ""):
            first = next(iter(found), None)
            self.calls.append(LayerCall(path, type(layer).__name__, inputs, first, *more))


@travels
@dataclass(frozen=True)
class Observation:
    """What one framework does with a task's model."""

    framework: str  # "torch" or "tf"
    initial: PortableState  # the arrays that it begins with by itself
    forward: ForwardPass  # a forward pass with the first batch
    random_layers: tuple[str, ...] = ()  # whose outputs differ between two evaluations with equal inputs
    is_random_in_training: bool = False  # whether the loss does in training, without dropout
    dropout_rates: tuple[float, ...] = ()  # rates of the dropout layers, which are off in the steps
    losses: Mapping[int, float] = field(default_factory=dict)  # of steps, from 1
    arrays: Mapping[int, PortableState] = field(default_factory=dict)  # the model's after steps
    optimizer: str = ""  # its class
    batches: Sequence[int] = ()  # a digest of each batch
    trained: Sequence[str] = ()  # names of the parameters that training changes
    note: str = ""  # why it does not compute in fp64; empty if it does


@dataclass(frozen=True)
class Row:
    """One call of a layer in both frameworks."""

    path: str  # the layer's portable path, with the number of the call from the second on
    left: LayerCall  # PyTorch's call
    right: LayerCall  # TensorFlow's

    @cached_property
    def inputs(self) -> Difference | None:
        """How far the inputs are apart; None if that cannot be said."""
        return None if self.input_arrays is None else difference(*self.input_arrays)

    @cached_property
    def outputs(self) -> Difference | None:
        """How far the outputs are apart; None if that cannot be said."""
        return None if self.output_arrays is None else difference(*self.output_arrays)

    @cached_property
    def input_arrays(self) -> tuple[Array, Array] | None:
        """The inputs in one layout."""
        return aligned(self.left.inputs, self.right.inputs)

    @cached_property
    def output_arrays(self) -> tuple[Array, Array] | None:
        """The outputs in one layout, without the activation that TensorFlow's layer itself applies."""
        ends = (self.right.outputs, self.right.before_activation)
        pairs = [pair for end in ends if (pair := aligned(self.left.outputs, end)) is not None]
        return min(pairs, key=lambda pair: difference(*pair).absolute, default=None)

    @property
    def has_other_shape(self) -> bool:
        """Whether both give an output, of shapes that are none of one array."""
        return self.left.outputs is not None and self.right.outputs is not None and self.output_arrays is None


def make_rows(left: ForwardPass, right: ForwardPass, names: Iterable[str]) -> list[Row]:
    """Return the layers with parameters that both call, in PyTorch's order, and at last the model's outputs.

    What holds layers that both call is left out, and layers without parameters, whose names may be equal by
    chance. ``names`` are portable names of the model's arrays.
    """
    parts = [name.removeprefix("model/").split("/") for name in names]
    owners = {"/".join(one[:count]) for one in parts for count in range(1, len(one))}
    theirs = dict(_numbered(right))
    rows = [
        Row(path if number == 1 else f"{path} #{number}", call, theirs[path, number])
        for (path, number), call in _numbered(left)
        if (path, number) in theirs and path in owners
    ]
    paths = {row.left.path for row in rows}
    rows = [row for row in rows if not any(other.startswith(f"{row.left.path}/") for other in paths)]
    for number, pair in enumerate(zip(left.outputs, right.outputs, strict=False), 1):
        one, other = (LayerCall(OUTPUTS, "", array, array) for array in pair)
        rows.append(Row(OUTPUTS if number == 1 else f"{OUTPUTS} #{number}", one, other))
    return rows


def _numbered(side: ForwardPass) -> Iterator[tuple[tuple[str, int], LayerCall]]:
    counts: Counter[str] = Counter()
    for call in side.calls:
        counts[call.path] += 1
        yield (call.path, counts[call.path]), call


@dataclass(frozen=True)
class Divergence:
    """Where two models begin to differ."""

    row: Row  # the first call that differs
    before: bool  # whether its inputs differ already: what is computed between it and the layers before it
    earlier: Sequence[Row]  # the calls before it, which do not differ

    @property
    def apart(self) -> Difference:
        """How far they are apart there."""
        found = self.row.inputs if self.before else self.row.outputs
        return found or Difference(float("nan"), float("nan"))

    @property
    def place(self) -> str:
        """The layer's path, or between which layers the difference lies."""
        row = self.row
        if not self.before and row.left.path != OUTPUTS:
            return row.path
        name = row.path.replace(OUTPUTS, "the model's outputs")
        earlier = next((one.path for one in reversed(self.earlier) if one.left.path != OUTPUTS), "")
        return f"between {earlier} and {name}" if earlier else f"before {name}"


def first_divergence(rows: Sequence[Row], most: float) -> Divergence | None:
    """Return where two models begin to differ by more than ``most``, relative; None if they do not."""
    for place, row in enumerate(rows):
        before, after = (apart is not None and apart.relative > most for apart in (row.inputs, row.outputs))
        if before or after or row.has_other_shape:
            return Divergence(row, before and row.left.path != OUTPUTS, rows[:place])
    return None
