"""What made two models differ: one finding for each cause, as far as both frameworks state it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.tools.parity.observation import OUTPUTS, Array, Divergence, Row, difference

_LEAST = 1e-6  # a factor that is closer to 1 is none
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


def constant_factor(left: Array, right: Array) -> float | None:
    """Return what the second array is multiplied by in the first; None if it is no constant other than 1."""
    x, y = left.ravel().astype(np.float64), right.ravel().astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not y.any() or not x.any():
        return None
    factor = float(x @ y / (y @ y))
    fits = difference(x, factor * y).relative < _LEAST
    return factor if fits and abs(factor - 1) > _LEAST else None


def is_reordered(left: Array, right: Array) -> bool:
    """Return whether each sample has the same numbers in another order."""
    if left.shape != right.shape or left.ndim < 2:
        return False
    one, other = (np.sort(array.reshape(len(array), -1), axis=1) for array in (left, right))
    return one.shape[1] > 1 and difference(one, other).relative < _LEAST


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


def explain(divergence: Divergence) -> Finding:
    """Return why two models begin to differ at a place, as far as the arrays there show."""
    row, place = divergence.row, divergence.place
    is_between = divergence.before or row.left.path == OUTPUTS
    pair = row.input_arrays if is_between else row.output_arrays
    if not is_between:
        for what in ("inputs", "outputs"):
            left, right = getattr(row.left, what), getattr(row.right, what)
            if left is not None and right is not None and getattr(row, what) is None:
                text = f"PyTorch's {what} have shape {left.shape}, TensorFlow's {right.shape}"
                return Finding("shape", place, text)
    if is_between and pair is not None and is_reordered(*pair):
        return Finding("layout", place, (
            "both have the same numbers in another order: PyTorch flattens channels first, Keras last; "
            "permute before flattening"
        ))  # fmt: skip
    if pair is not None and (factor := constant_factor(*pair)) is not None:
        return Finding("scale", place, f"PyTorch's numbers are {factor:.6g} times TensorFlow's")
    apart = f"{divergence.apart.relative:.1e}"
    if divergence.before:
        text = (
            f"the inputs of {row.path} differ by {apart}, and the outputs of all layers before it do not: "
            "look at what the models compute between layers, such as the form of GELU"
        )
    elif row.left.path == OUTPUTS:
        text = f"the outputs differ by {apart}, and those of all layers that both have do not"
    else:
        text = (
            f"{row.left.kind} in PyTorch, {row.right.kind} in TensorFlow: outputs differ by {apart} for the "
            "same inputs; compare what they were made with"
        )
    return Finding("unknown", place, text)
