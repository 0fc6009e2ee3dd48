"""What made two models differ: one finding for each cause, as far as both frameworks state it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import PortableState
from hvdtrain.parity.differences import difference
from hvdtrain.parity.symptoms import constant_factor
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.rows import Row

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
    """One cause of a difference.

    Attributes:
        suspect: what it is, such as "epsilon".
        layer: the layer's portable path, or what else it is of.
        text: both frameworks' numbers, and what to do.
    """

    suspect: str
    layer: str
    text: str


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
