"""What made two models differ: one finding for each cause, as far as both frameworks state it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.records import PortableState
from hvdtrain.tools.parity.observation import Array, Observation, difference
from hvdtrain.tools.parity.rows import Row

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


def different_values(left: PortableState, right: PortableState) -> Iterator[Finding]:
    """Yield the parameters that do not start from equal values."""
    for name in left:
        if name not in right or left[name].shape != right[name].shape:
            continue
        one, other = left[name], right[name]
        apart = difference(one, other)
        if apart.relative <= _SAME:
            continue
        text = f"{name.removeprefix('model/')} differs by up to {apart.absolute:.3g}"
        if (
            one.ndim == _DIMENSIONS
            and one.shape[0] == one.shape[1]
            and difference(one.T, other).relative <= _SAME
        ):
            text += "; TensorFlow's is PyTorch's transposed"
        elif (factor := constant_factor(one, other)) is not None:
            text += f"; PyTorch's is {factor:.6g} times TensorFlow's"
        yield Finding("initial value", name.removeprefix("model/").rpartition("/")[0], text)


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


def not_finite(left: Observation, right: Observation, precision: str) -> Iterator[Finding]:
    """Yield losses of training that are not finite, and those of samples if only one framework's are."""
    sides = ((left, "PyTorch"), (right, "TensorFlow"))
    for side, title in sides:
        for state in side.steps:
            if not math.isfinite(state.loss):
                yield Finding(
                    "loss that is not finite",
                    "the loss",
                    f"{title}'s is {state.loss} in step {state.step} in {precision}: "
                    "lower the learning rate, or look for what overflows",
                )
    are_finite = [bool(np.isfinite(side.forward.losses).all()) for side, _ in sides]
    if are_finite[0] != are_finite[1]:
        title = sides[are_finite.index(False)][1]
        text = f"losses of samples in evaluation are not finite in {title} alone, in {precision}"
        yield Finding("loss that is not finite", "the loss", text)


def of_observations(left: Observation, right: Observation) -> Iterator[Finding]:
    """Yield what differs of two frameworks' data and random numbers."""
    both = [step for step in left.batches if step in right.batches]  # a loss that is not finite ends a side
    steps = [step for step in both if left.batches[step] != right.batches[step]]
    if steps:
        yield Finding(
            "data",
            f"step {steps[0]}",
            "the frameworks are given other samples: the task's data depend on the framework, or on chance",
        )
    for side, title in ((left, "PyTorch"), (right, "TensorFlow")):
        for layer in side.random_layers:
            yield Finding(
                "dropout left on",
                layer,
                f"in evaluation, {title} gives other outputs in two passes with the same samples",
            )
        if side.is_random_in_training and not side.random_layers:
            yield Finding(
                "random numbers in training",
                "the model",
                f"{title}'s loss differs between two passes with the same samples though "
                "dropout layers are off; "
                "steps cannot be compared: set the rates of dropout that is no layer to 0",
            )
    yield from _frozen(left, right)
    # not how many: one layer of PyTorch's may serve in several places
    rates = [sorted(set(side.dropout_rates)) for side in (left, right)]
    if rates[0] != rates[1] and not (left.random_layers or right.random_layers):
        yield Finding("dropout rate", "the model", f"{rates[0]} in PyTorch, {rates[1]} in TensorFlow")


def _frozen(left: Observation, right: Observation) -> Iterator[Finding]:
    """Yield the first parameter that only one framework trains, of those that both have."""
    pairs = ((left, right, "PyTorch", "TensorFlow"), (right, left, "TensorFlow", "PyTorch"))
    for one, other, title, other_title in pairs:
        has = other.steps[0].parameters if other.steps else {}
        names = [name for name in one.trained if name not in other.trained and name in has]
        if names:
            name = names[0].removeprefix("model/")
            yield Finding(
                FROZEN,
                name.rpartition("/")[0],
                f"{title} trains {name}, and {other_title} does not"
                + (f"; so with {len(names) - 1} others" if len(names) > 1 else ""),
            )


def different_optimizers(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what the optimizers were made with that differs."""
    for name in left:
        if name != CLASS and name in right and not _equal(left[name], right[name]):
            yield Finding(
                f"{name} of the optimizer",
                "the optimizer",
                f"{left[name]} in PyTorch, {right[name]} in TensorFlow",
            )
