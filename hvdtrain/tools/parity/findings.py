"""What made two models differ: one finding for each cause, as far as both frameworks state it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.backends.records import PortableState
from hvdtrain.tools.parity.observation import OUTPUTS, Array, Divergence, Row, difference

_CLOSE = 1e-5  # relative; the two forms of GELU are 1e-4 apart
_LEAST = 1e-6  # a factor that is closer to 1 is none
_MOST_NUMBERS = 4096
_KINDS = 3  # of different numbers that are needed to tell functions apart
MOMENTUM = "momentum convention"
CLASS = "class"  # of an optimizer: others of other names may do the same
_ALWAYS = {"epsilon", "kept statistics", "gelu", "negative slope", "rate"}
_SAME = 1e-9  # relative; of settings


@dataclass(frozen=True)
class Finding:
    """One cause of a difference."""

    suspect: str  # what it is, such as "epsilon"
    layer: str  # the layer's portable path, or what else it is of
    text: str  # both frameworks' numbers, and what to do


def _sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


# Sources: Hendrycks and Gimpel 2016 (GELU), Clevert et al. 2016 (ELU), Klambauer et al. 2017 (SELU)
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "no activation": lambda x: x,
    "GELU by erf": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "GELU by tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "GELU by sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "leaky ReLU of slope 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU of slope 0.2": lambda x: np.where(x > 0, x, 0.2 * x),
    "leaky ReLU of slope 0.3": lambda x: np.where(x > 0, x, 0.3 * x),
    "SiLU": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "SELU": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
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
    one, other = (np.sort(array.reshape(len(array), -1), axis=1) for array in (left, right))
    return one.shape[1] > 1 and difference(one, other).relative < _LEAST


def zero_borders(array: Array) -> list[tuple[int, int]]:
    """Return how many zero slices lie before and behind the rest, for each axis but the first and last."""
    found = []
    for axis in range(1, array.ndim - 1):
        others = tuple(i for i in range(array.ndim) if i != axis)
        filled = np.flatnonzero(array.any(axis=others))
        found.append((int(filled[0]), int(array.shape[axis] - 1 - filled[-1])) if len(filled) else (0, 0))
    return found


def different_settings(rows: Sequence[Row], most: float) -> Iterator[Finding]:
    """Yield what layers were made with that differs.

    What another operation can make up for, such as padding, counts only if the layer's outputs are more than
    ``most`` apart. Layers that have a name in common and no parameters count only if they are given the same
    inputs.
    """
    seen = set()
    for row in rows:
        has_same_inputs = row.inputs is not None and row.inputs.relative <= most
        if row.left.path in seen or not (row.has_parameters or has_same_inputs):
            continue
        seen.add(row.left.path)
        theirs = row.right.settings
        for name, value in row.left.settings.items():
            is_compared = name in theirs and (name in _ALWAYS or row.differs(most))
            if is_compared and not equal_settings(value, theirs[name], _SAME):
                suspect, text = _setting_words(name, value, theirs[name])
                yield Finding(suspect, row.left.path, text)


def equal_settings(one: Any, other: Any, relative: float) -> bool:
    """Return whether two settings are equal, but for rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=relative)
    return bool(one == other)


def _setting_words(name: str, left: Any, right: Any) -> tuple[str, str]:
    """Return what a setting that differs is called, and the sentence on it."""
    one, other = (f"{value:g}" if isinstance(value, float) else str(value) for value in (left, right))
    if name == "kept statistics":
        text = f"PyTorch keeps {one} of the old statistics, Keras {other}: PyTorch's momentum is 1 - Keras's"
        return MOMENTUM, text
    if name == "padding":
        one, other = (
            " ".join(f"({before}, {after})" for before, after in padding) for padding in (left, right)
        )
        return name, (
            f"PyTorch adds {one}, TensorFlow {other} (before and after, for each axis); Keras's 'same' adds "
            "what is odd behind: pad with torch.nn.functional.pad, or with keras.layers.ZeroPadding2D"
        )
    return {"gelu": "GELU form"}.get(name, name), f"{one} in PyTorch, {other} in TensorFlow"


def different_beginnings(left: PortableState, right: PortableState) -> Iterator[Finding]:
    """Yield the parameters whose own initial values are no default and differ, before both get equal ones.

    Defaults of the frameworks differ, and are no finding: PyTorch draws biases, Keras sets them to 0.
    """
    for name in [name for name in left if name in right and left[name].shape == right[name].shape]:
        layer, _, role = name.rpartition("/")
        one, other = (side[name].astype(np.float64) for side in (left, right))
        if not one.size or difference(one, other).relative <= _SAME:
            continue
        if role == "bias":
            kernel = left.get(f"{layer}/kernel")
            if kernel is None or f"{layer}/recurrent_kernel" in left:  # of which Keras's default is not 0
                continue
            reach = 1.001 / math.sqrt(math.prod(kernel.shape[:-1]) or 1)  # of PyTorch's default
            is_own = other.any() or (one.size > 1 and np.ptp(one) == 0) or abs(one).max() > reach
        else:  # kernels are drawn from other distributions by default
            is_own = role in ("gamma", "beta", "moving_mean", "moving_variance")
        if is_own:
            own, path = name.removeprefix("model/"), layer.removeprefix("model/")
            yield Finding("initial value", path, (
                f"{own} starts from {_range(one)} in PyTorch and from {_range(other)} in TensorFlow; here "
                "both got equal values for all else that is compared. Give both the same, or train with "
                "initial_parameters: portable"
            ))  # fmt: skip


def _range(array: Array) -> str:
    low, high = array.min(), array.max()
    return f"{low:.4g}" if low == high else f"values between {low:.2g} and {high:.2g}"


def explain(divergence: Divergence) -> Finding:
    """Return why two models begin to differ at a place, as far as the arrays there tell."""
    row, place = divergence.row, divergence.place
    is_between = divergence.before or row.left.path == OUTPUTS
    pair = row.input_arrays if is_between else row.output_arrays
    found = None
    if not is_between and pair is None:
        left, right = (None if one is None else one.shape for one in (row.left.outputs, row.right.outputs))
        found = "shape", f"PyTorch's output has shape {left}, TensorFlow's {right}"
    elif not is_between:
        found = _padded(row)
    if pair is not None and found is None:
        found = _by_numbers(divergence, is_between, *pair)
    if found is not None:
        return Finding(found[0], place, found[1])
    apart = f"{divergence.apart.relative:.1e}"
    if divergence.before:
        text = (
            f"the inputs of {row.path} differ by {apart}, and the outputs of all layers before it do not: "
            "look at what the models compute between layers"
        )
    elif row.left.path == OUTPUTS:
        text = f"the outputs differ by {apart}, and those of all layers that both have do not"
    else:
        text = (
            f"{row.left.kind} in PyTorch, {row.right.kind} in TensorFlow: outputs differ by {apart} for the "
            "same inputs; compare what they were made with"
        )
    return Finding("unknown", place, text)


def _by_numbers(
    divergence: Divergence, is_between: bool, left: Array, right: Array
) -> tuple[str, str] | None:
    """Return a cause and the sentence on it that two arrays show, by what was computed before them."""
    row = divergence.row
    sources = [(row.path, row.input_arrays)]
    if is_between:
        sources = [(one.path, one.output_arrays) for one in reversed(divergence.earlier)]
    for path, before in sources:
        if before is None or before[0].shape != left.shape:
            continue
        names = [activation_between(x, y) for x, y in zip(before, (left, right), strict=True)]
        if (any(names) if is_between else all(names)) and names[0] != names[1]:
            suspect = "GELU form" if all(name.startswith("GELU") for name in names) else "activation"
            one, other = (name or "something else" for name in names)
            return suspect, f"{f'after {path}, ' * is_between}PyTorch computes {one}, TensorFlow {other}"
    if is_between and is_reordered(left, right):
        return "layout", (
            "both have the same numbers in another order: PyTorch flattens channels first, Keras last; "
            "permute before flattening"
        )
    if differs_but_at_the_end(left, right):
        return "attention mask", (
            "both agree at the last position alone: one of them masks later positions (a causal mask)"
        )
    factor = constant_factor(left, right) if left.shape == right.shape else None
    return ("scale", f"PyTorch's numbers are {factor:.6g} times TensorFlow's") if factor else None


def _padded(row: Row) -> tuple[str, str] | None:
    """Find convolutions whose inputs another layer has padded with zeros, in one framework otherwise."""
    found = []
    for call in (row.left, row.right):
        stated, inputs = call.settings.get("padding"), call.inputs
        if stated is None or inputs is None:
            return None
        borders = zero_borders(np.moveaxis(inputs, 1, -1) if call.channels_first else inputs)
        found.append([[a + c, b + d] for (a, b), (c, d) in zip(stated, borders, strict=True)])
    return None if found[0] == found[1] else _setting_words("padding", *found)
