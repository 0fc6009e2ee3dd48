"""What made two models differ: one finding for each cause, as far as both frameworks state it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.records import PortableState
from hvdtrain.tools.parity.observation import Array, difference
from hvdtrain.tools.parity.rows import OUTPUTS, Divergence, Row

_CLOSE = 1e-5  # relative; the two forms of GELU are 1e-4 apart
_LEAST = 1e-6  # a factor that is closer to 1 is none
_MOST_NUMBERS = 4096
_KINDS = 3  # of different numbers that are needed to tell functions apart


def _erf(x: Array) -> Array:
    found: Array = np.vectorize(math.erf, otypes=[float])(x)
    return found


def _sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def _leaky(slope: float) -> Callable[[Array], Array]:
    return lambda x: np.where(x > 0, x, slope * x)


# Sources: Hendrycks and Gimpel 2016 (GELU), Clevert et al. 2016 (ELU), Klambauer et al. 2017 (SELU)
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "no activation": lambda x: x,
    "GELU by erf": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "GELU by tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "GELU by sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "leaky ReLU of slope 0.01": _leaky(0.01),
    "leaky ReLU of slope 0.2": _leaky(0.2),
    "leaky ReLU of slope 0.3": _leaky(0.3),
    "SiLU": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "SELU": lambda x: (
        1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    ),
}


def activation_between(inputs: Array, outputs: Array) -> str:
    """Return the function of single numbers that gives these outputs; empty if none that is known does."""
    if inputs.shape != outputs.shape or not inputs.size:
        return ""
    every = max(inputs.size // _MOST_NUMBERS, 1)
    x, y = (array.ravel()[::every].astype(np.float64) for array in (inputs, outputs))
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or len(np.unique(y)) < _KINDS:
        return ""
    with np.errstate(all="ignore"):
        apart = {name: difference(function(x), y).relative for name, function in ACTIVATIONS.items()}
    best = min(apart, key=lambda name: apart[name])
    return best if apart[best] < _CLOSE else ""


def constant_factor(left: Array, right: Array) -> float | None:
    """Return what the second array is multiplied by in the first; None if it is no constant other than 1."""
    x, y = left.ravel().astype(np.float64), right.ravel().astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not y.any() or not x.any():
        return None
    factor = float(x @ y / (y @ y))
    fits = difference(x, factor * y).relative < _LEAST
    return factor if fits and abs(factor - 1) > _LEAST else None


def differs_but_at_the_end(left: Array, right: Array) -> bool:
    """Return whether sequences agree at their last position alone, as if one side could not look ahead."""
    if left.shape != right.shape or left.ndim < 3 or left.shape[1] < 2:
        return False
    apart = [difference(left[:, place], right[:, place]).relative for place in range(left.shape[1])]
    return apart[-1] < _LEAST and min(apart[:-1]) > _CLOSE


def is_reordered(left: Array, right: Array) -> bool:
    """Return whether each sample has the same numbers in another order."""
    if left.shape != right.shape or left.ndim < 2:
        return False
    one, other = (
        np.sort(array.reshape(len(array), -1).astype(np.float64), axis=1) for array in (left, right)
    )
    return one.shape[1] > 1 and difference(one, other).relative < _LEAST


def zero_borders(array: Array) -> list[tuple[int, int]]:
    """Return how many zero slices lie before and behind the rest, for each axis but the first and last."""
    found = []
    for axis in range(1, array.ndim - 1):
        others = tuple(i for i in range(array.ndim) if i != axis)
        filled = np.flatnonzero(array.any(axis=others))
        size = array.shape[axis]
        found.append((int(filled[0]), int(size - 1 - filled[-1])) if len(filled) else (0, 0))
    return found


def product_with(kernel: Array, bias: Array | None, inputs: Array, outputs: Array) -> str:
    """Return whether a layer multiplies with a square kernel "as it is" or "transposed"; empty if neither."""
    size = len(kernel)
    if inputs.shape[-1:] != (size,) or outputs.shape[-1:] != (size,):
        return ""
    x, y, w = (array.astype(np.float64) for array in (inputs, outputs, kernel))
    added = 0.0 if bias is None else bias.astype(np.float64)
    for name, matrix in (("as it is", w), ("transposed", w.T)):
        if difference(x @ matrix + added, y).relative < _CLOSE:
            return name
    return ""


MISSING_BIAS = "missing bias"
FROZEN = "frozen parameters"
MOMENTUM = "momentum convention"
CONSTRAINTS = "constraints"  # of Keras's parameters, which its optimizers apply
CLASS = "class"  # of an optimizer: others of other names may do the same
_ALWAYS = {"epsilon", "kept statistics", "gelu", "negative slope", "rate"}
_SAME = 1e-9  # relative; of settings
_DIMENSIONS = 2


@dataclass(frozen=True)
class Finding:
    """One cause of a difference."""

    suspect: str  # what it is, such as "epsilon"
    layer: str  # the layer's portable path, or what else it is of
    text: str  # both frameworks' numbers, and what to do


def different_settings(rows: Sequence[Row], most: float) -> Iterator[tuple[int, Finding]]:
    """Yield what layers were made with that differs, each with the place of its row.

    What another operation can make up for, such as padding, counts only if the layer's outputs differ. Layers
    that have a name in common and no parameters count only if they are given the same inputs.

    Args:
        rows: the layers that both call.
        most: the largest relative difference of outputs that counts as none.
    """
    seen = set()
    for place, row in enumerate(rows):
        if row.layer in seen or not (row.has_parameters or row.has_same_inputs(most)):
            continue
        seen.add(row.layer)
        left, right = row.left.settings, row.right.settings
        for name in left:
            if name not in right or _equal(left[name], right[name]):
                continue
            if name in _ALWAYS or row.differs(most):
                suspect, text = setting_words(name, left[name], right[name])
                yield place, Finding(suspect, row.layer, text)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_SAME)
    return bool(one == other)


def setting_words(name: str, left: Any, right: Any) -> tuple[str, str]:
    """Return what a setting that differs is called, and the sentence on it."""
    if name == "kept statistics":
        ours = "takes the mean of all batches" if left is None else f"{1 - left:g} keeps {left:g}"
        return MOMENTUM, (
            f"PyTorch's momentum {ours} of the old statistics, Keras's {right:g} keeps "
            f"{right:g}: PyTorch's is "
            "1 - Keras's"
        )
    if name == "padding":
        return name, (
            f"PyTorch adds {_pairs(left)}, TensorFlow {_pairs(right)} (before and after, for "
            "each axis); Keras's "
            "'same' adds what is odd behind: pad with torch.nn.functional.pad, or with "
            "keras.layers.ZeroPadding2D"
        )
    if name == "gelu":
        return "GELU form", f"PyTorch computes it by {left}, TensorFlow by {right}"
    return name, f"{_number(left)} in PyTorch, {_number(right)} in TensorFlow"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _pairs(padding: Sequence[Sequence[int]]) -> str:
    return " ".join(f"({before}, {after})" for before, after in padding)


def different_beginnings(left: PortableState, right: PortableState) -> Iterator[Finding]:
    """Yield the parameters whose own initial values are no default and differ, before both get equal ones.

    Defaults of the frameworks differ, and are no finding: PyTorch draws biases, Keras sets them to 0.
    """
    for name in [name for name in left if name in right and left[name].shape == right[name].shape]:
        layer, _, role = name.rpartition("/")
        one, other = (side[name].astype(np.float64) for side in (left, right))
        kernel = left.get(f"{layer}/kernel")
        if not one.size or difference(one, other).relative <= _SAME:
            continue
        if role == "bias":
            if kernel is None or f"{layer}/recurrent_kernel" in left:  # of which Keras's default is not 0
                continue
            reach = 1.001 / math.sqrt(math.prod(kernel.shape[:-1]) or 1)  # of PyTorch's default
            is_constant = one.size > 1 and one.min() == one.max()
            is_own = other.any() or is_constant or abs(one).max() > reach
        else:  # kernels are drawn from other distributions by default
            is_own = role in ("gamma", "beta", "moving_mean", "moving_variance")
        if is_own:
            yield Finding(
                "initial value",
                layer.removeprefix("model/"),
                f"{name.removeprefix('model/')} starts from {_range(one)} in PyTorch and from "
                f"{_range(other)} in TensorFlow; here both got equal values for all else that is compared. "
                "Give both the same, or train with initial_parameters: portable",
            )


def _range(array: NDArray[Any]) -> str:
    low, high = array.min(), array.max()
    return f"{low:.4g}" if low == high else f"values between {low:.2g} and {high:.2g}"


def explain(divergence: Divergence, start: PortableState) -> Finding:
    """Return why two models begin to differ at a place, as far as the arrays there tell.

    Args:
        divergence: the place.
        start: the parameters, which are the same in both frameworks.
    """
    row = divergence.row
    found = _between(divergence) if divergence.before or row.layer == OUTPUTS else _of_layer(row, start)
    return found or Finding("unknown", place_of(divergence), _unexplained(divergence))


def place_of(divergence: Divergence) -> str:
    """Return a layer's path, or between which layers a difference lies."""
    row, earlier = divergence.row, _last_layer(divergence)
    if not divergence.before and row.layer != OUTPUTS:
        return row.path
    name = f"the model's outputs{row.path.removeprefix(OUTPUTS)}" if row.layer == OUTPUTS else row.path
    return f"between {earlier} and {name}" if earlier else f"before {name}"


def _last_layer(divergence: Divergence) -> str:
    return next((row.path for row in reversed(divergence.earlier) if row.layer != OUTPUTS), "")


def _between(divergence: Divergence) -> Finding | None:
    """Explain a difference of what is computed between layers."""
    pair = divergence.row.input_arrays
    if pair is None:
        return None
    place = place_of(divergence)
    for row in reversed(divergence.earlier):
        before = row.output_arrays
        if before is None or before[0].shape != pair[0].shape:
            continue
        names = [activation_between(x, y) for x, y in zip(before, pair, strict=True)]
        if any(names) and names[0] != names[1]:
            is_gelu = all(name.startswith("GELU") for name in names)
            left, right = (name or "something else" for name in names)
            return Finding(
                "GELU form" if is_gelu else "activation",
                place,
                f"after {row.path}, PyTorch computes {left}, TensorFlow {right}",
            )
    if is_reordered(*pair):
        return Finding(
            "layout",
            place,
            "both have the same numbers in another order: PyTorch flattens channels first, "
            "Keras last; permute "
            "before flattening",
        )
    return _looking_ahead(place, *pair) or _scaled("scale", place, *pair)


def _looking_ahead(place: str, left: Array, right: Array) -> Finding | None:
    if not differs_but_at_the_end(left, right):
        return None
    text = "both agree at the last position alone: one of them masks later positions (a causal mask)"
    return Finding("attention mask", place, text)


def _of_layer(row: Row, start: PortableState) -> Finding | None:
    """Explain why a layer gives other outputs for the same inputs."""
    pair, inputs = row.output_arrays, row.input_arrays
    if pair is None:
        left, right = row.left.outputs, row.right.outputs
        shapes = [None if array is None else array.shape for array in (left, right)]
        return Finding("shape", row.path, f"PyTorch's output has shape {shapes[0]}, TensorFlow's {shapes[1]}")
    if (found := _padded(row)) is not None:
        return found
    if inputs is not None:
        if (found := _transposed(row.layer, start, inputs, pair)) is not None:
            return found
        names = [activation_between(x, y) for x, y in zip(inputs, pair, strict=True)]
        if all(names) and names[0] != names[1]:
            suspect = "GELU form" if all(name.startswith("GELU") for name in names) else "activation"
            return Finding(suspect, row.path, f"PyTorch computes {names[0]}, TensorFlow {names[1]}")
    return _looking_ahead(row.path, *pair) or _scaled("scale", row.path, *pair)


def _padded(row: Row) -> Finding | None:
    """Find convolutions whose inputs another layer has padded with zeros, in one framework otherwise."""
    found = []
    for call in (row.left, row.right):
        stated, inputs = call.settings.get("padding"), call.inputs
        if stated is None or inputs is None:
            return None
        borders = zero_borders(np.moveaxis(inputs, 1, -1) if call.channels_first else inputs)
        found.append([[a + c, b + d] for (a, b), (c, d) in zip(stated, borders, strict=True)])
    if found[0] == found[1]:
        return None
    return Finding("padding", row.path, setting_words("padding", *found)[1])


def _transposed(
    layer: str, start: PortableState, inputs: tuple[Array, Array], outputs: tuple[Array, Array]
) -> Finding | None:
    """Find a square kernel with which one framework multiplies as it is, the other transposed."""
    own = {name: array for name, array in start.items() if name.startswith(f"model/{layer}/")}
    biases = [None, *(array for array in own.values() if array.ndim == 1)]
    for name, kernel in own.items():
        if kernel.ndim != _DIMENSIONS or kernel.shape[0] != kernel.shape[1]:
            continue
        for bias in biases:
            if bias is not None and bias.shape != kernel.shape[1:]:
                continue
            ways = [product_with(kernel, bias, x, y) for x, y in zip(inputs, outputs, strict=True)]
            if all(ways) and ways[0] != ways[1]:
                text = (
                    f"PyTorch multiplies with {name.removeprefix('model/')} {ways[0]}, TensorFlow {ways[1]}"
                )
                return Finding("transposed kernel", layer, text)
    return None


def _scaled(suspect: str, place: str, left: Array, right: Array) -> Finding | None:
    factor = constant_factor(left, right) if left.shape == right.shape else None
    if factor is None:
        return None
    return Finding(suspect, place, f"PyTorch's numbers are {factor:.6g} times TensorFlow's")


def _unexplained(divergence: Divergence) -> str:
    row, apart = divergence.row, divergence.apart
    kinds = f"{row.left.kind} in PyTorch, {row.right.kind} in TensorFlow"
    if divergence.before:
        return (
            f"the inputs of {row.path} differ by {apart.relative:.1e}, and the outputs of all "
            "layers before it "
            "do not: look at what the models compute between layers"
        )
    if row.layer == OUTPUTS:
        return f"the outputs differ by {apart.relative:.1e}, and those of all layers that both have do not"
    return (
        f"{kinds}: outputs differ by {apart.relative:.1e} for the same inputs; compare what they "
        "were made with"
    )
