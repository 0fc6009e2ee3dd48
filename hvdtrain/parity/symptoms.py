"""What made two arrays differ, as far as the arrays themselves tell."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from hvdtrain.parity.differences import Array, difference

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


def factor_of_scores(left: Array, right: Array) -> float | None:
    """Return what scores were multiplied by before a softmax gave the first array, and not the second.

    Probabilities tell scores but for a constant, which is taken off; those that are zero are left out.
    """
    x, y = left.astype(np.float64), right.astype(np.float64)
    if x.shape != y.shape:
        return None
    counted = (x > 0) & (y > 0)
    found = []
    for probabilities in (x, y):
        logs = np.log(np.where(counted, probabilities, 1.0))
        means = logs.sum(-1, keepdims=True) / np.maximum(counted.sum(-1, keepdims=True), 1)
        found.append(np.where(counted, logs - means, 0.0))
    return constant_factor(*found)


def mask_of(left: Array, right: Array) -> tuple[int, str] | None:
    """Return which of two arrays of probabilities has zeros where the other has none, and which places."""
    if left.shape != right.shape:
        return None
    for side, (one, other) in enumerate(((left, right), (right, left))):
        masked = (one == 0) & (other > 0)
        if not masked.any() or ((other == 0) & (one > 0)).any():
            continue
        if one.ndim > 1 and one.shape[-1] == one.shape[-2] > 1:
            later = np.triu(np.ones(one.shape[-2:], bool), 1)
            if (masked == later).all() or (masked == later.T).all():  # layouts of equal axes
                return side, "later positions (a causal mask)"
        return side, f"{masked.mean():.0%} of the positions"
    return None


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
