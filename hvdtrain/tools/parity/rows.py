"""The layers that both frameworks call, side by side, and where they begin to differ."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdtrain.tools.parity.observation import (
    Array,
    Difference,
    ForwardPass,
    LayerCall,
    aligned,
    difference,
)

_AXES_DIFFER = 1e-2  # relative
OUTPUTS = "(outputs)"  # the path of the model's outputs


@dataclass(frozen=True)
class Row:
    """One call of a layer in both frameworks."""

    path: str  # the layer's portable path, with the number of the call from the second on
    left: LayerCall  # PyTorch's call
    right: LayerCall  # TensorFlow's
    # whether the layer has parameters; else the pair has a name in common, maybe by chance
    has_parameters: bool = True

    @property
    def layer(self) -> str:
        """The layer's path."""
        return self.left.path

    @cached_property
    def inputs(self) -> Difference | None:
        """How far the inputs are apart; None if that cannot be said."""
        return _apart(self.input_arrays)

    @cached_property
    def outputs(self) -> Difference | None:
        """How far the outputs are apart; None if that cannot be said."""
        return _apart(self.output_arrays)

    def differs(self, most: float) -> bool:
        """Whether the outputs are further apart than ``most``, relative, or of other shapes."""
        return self.has_other_shape or (self.outputs is not None and self.outputs.relative > most)

    def has_same_inputs(self, most: float) -> bool:
        """Whether the inputs are at most ``most`` apart, relative."""
        return self.inputs is not None and self.inputs.relative <= most

    @cached_property
    def input_arrays(self) -> tuple[Array, Array] | None:
        """The inputs in one layout."""
        return self._aligned(self.left.inputs, self.right.inputs)

    @property
    def axes_differ(self) -> bool:
        """Whether outputs of one shape agree only with PyTorch's axes in another order."""
        left, right, pair = self.left.outputs, self.right.outputs, self.output_arrays
        if left is None or right is None or pair is None or left.shape != right.shape:
            return False
        as_it_is = difference(left, right).relative
        return as_it_is > _AXES_DIFFER and difference(*pair).relative < _AXES_DIFFER * as_it_is

    @cached_property
    def output_arrays(self) -> tuple[Array, Array] | None:
        """The outputs in one layout, without the activation that TensorFlow's layer itself applies."""
        own = self._aligned(self.left.outputs, self.right.outputs)
        before = self._aligned(self.left.outputs, self.right.before_activation)
        if own is None or before is None:
            return own or before
        return min(own, before, key=lambda pair: difference(*pair).absolute)

    @property
    def has_other_shape(self) -> bool:
        """Whether both give an output, of shapes that are none of one array."""
        return self.left.outputs is not None and self.right.outputs is not None and self.output_arrays is None

    def _aligned(self, left: Array | None, right: Array | None) -> tuple[Array, Array] | None:
        return aligned(left, right, self.left.channels_first, self.right.channels_first)


def _apart(pair: tuple[Array, Array] | None) -> Difference | None:
    return None if pair is None else difference(*pair)


def make_rows(left: ForwardPass, right: ForwardPass, names: Iterable[str]) -> list[Row]:
    """Return the layers that both call, in PyTorch's order, and at last the model's outputs.

    What holds layers that both call is left out.

    Args:
        left: PyTorch's calls.
        right: TensorFlow's.
        names: portable names of the model's arrays.
    """
    owners = {owner for name in names for owner in _owners(name.removeprefix("model/"))}
    found = dict(_numbered(right))
    rows = [
        Row(path if number == 1 else f"{path} #{number}", call, found[path, number], path in owners)
        for (path, number), call in _numbered(left)
        if (path, number) in found
    ]
    paths = {row.layer for row in rows}
    holding = {path for path in paths for other in paths if other.startswith(f"{path}/")}
    rows = [row for row in rows if row.layer not in holding]
    ends = [
        [LayerCall(OUTPUTS, "", {}, one, one) for one in (side.outputs, *side.more_outputs)]
        for side in (left, right)
    ]
    names = [OUTPUTS if number == 1 else f"{OUTPUTS} #{number}" for number in range(1, len(ends[0]) + 1)]
    return [*rows, *(Row(name, *pair) for name, *pair in zip(names, *ends, strict=False))]


def _owners(name: str) -> Iterator[str]:
    parts = name.split("/")
    for count in range(1, len(parts)):
        yield "/".join(parts[:count])


def _numbered(side: ForwardPass) -> list[tuple[tuple[str, int], LayerCall]]:
    counts: Counter[str] = Counter()
    found = []
    for call in side.calls:
        counts[call.path] += 1
        found.append(((call.path, counts[call.path]), call))
    return found


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


def first_divergence(rows: Sequence[Row], most: float) -> Divergence | None:
    """Return where two models begin to differ; None if they do not.

    Of layers that have a name in common and no parameters, only what they themselves do counts, and that
    only if something behind them differs.

    Args:
        rows: the calls.
        most: the largest relative difference that counts as none.
    """
    earlier: list[Row] = []
    for place, row in enumerate(rows):
        before = row.inputs is not None and row.inputs.relative > most
        if not before and not row.differs(most):
            earlier.append(row)
        elif row.layer == OUTPUTS or (row.has_parameters and (before or not row.has_other_shape)):
            return Divergence(row, before and row.layer != OUTPUTS, earlier)
        elif not before and _differs(rows[place + 1 :], most):
            return Divergence(row, False, earlier)
    return None


def _differs(rows: Sequence[Row], most: float) -> bool:
    counted = [row for row in rows if row.has_parameters]
    apart = [found for row in counted for found in (row.inputs, row.outputs) if found is not None]
    return any(found.relative > most for found in apart) or any(row.has_other_shape for row in counted)
