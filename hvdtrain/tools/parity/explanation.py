"""Why two models begin to differ at a place, as far as the arrays there tell."""

import numpy as np

from hvdtrain.backends.records import PortableState
from hvdtrain.tools.parity.findings import (
    Finding,
    activation_between,
    constant_factor,
    differs_but_at_the_end,
    factor_of_scores,
    is_reordered,
    mask_of,
    product_with,
    setting_words,
    zero_borders,
)
from hvdtrain.tools.parity.observation import SOFTMAX, Array
from hvdtrain.tools.parity.rows import OUTPUTS, Divergence, Row

_DIMENSIONS = 2


def explain(divergence: Divergence, start: PortableState) -> Finding:
    """Return why two models begin to differ at a place, as far as the arrays there tell.

    Args:
        divergence: the place.
        start: the parameters, which are the same in both frameworks.
    """
    row = divergence.row
    if divergence.before or row.layer == OUTPUTS:
        found = _between(divergence)
    elif row.layer == SOFTMAX:
        found = _of_softmax(divergence)
    else:
        found = _of_layer(row, start)
    return found or Finding("unknown", place_of(divergence), _unexplained(divergence))


def place_of(divergence: Divergence) -> str:
    """Return a layer's path, or between which layers a difference lies."""
    row, earlier = divergence.row, _last_layer(divergence)
    if row.layer == SOFTMAX:
        return f"the softmax after {earlier}" if earlier else "the first softmax"
    if not divergence.before and row.layer != OUTPUTS:
        return row.path
    name = f"the model's outputs{row.path.removeprefix(OUTPUTS)}" if row.layer == OUTPUTS else row.path
    return f"between {earlier} and {name}" if earlier else f"before {name}"


def _last_layer(divergence: Divergence) -> str:
    return next((row.path for row in reversed(divergence.earlier) if row.layer not in {SOFTMAX, OUTPUTS}), "")


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


def _of_softmax(divergence: Divergence) -> Finding | None:
    pair = divergence.row.output_arrays
    if pair is not None and (mask := mask_of(*pair)) is not None:
        masks, does_not = ("PyTorch", "TensorFlow") if mask[0] == 0 else ("TensorFlow", "PyTorch")
        return Finding(
            "attention mask", place_of(divergence), f"{masks} masks {mask[1]}, and {does_not} does not"
        )
    factor = factor_of_scores(*pair) if pair is not None else None
    if factor is None:
        return None
    return Finding(
        "attention scale",
        place_of(divergence),
        f"PyTorch multiplies scores by {factor:.6g} times what TensorFlow does",
    )


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
