"""What Keras's layers were made with; ``torch/settings.py`` uses the same names."""

from typing import Any

import keras
from keras import layers as kl

from hvdtrain.tools.parity.findings import CLASS

_CONVOLUTIONS = (kl.Conv1D, kl.Conv2D, kl.Conv3D)
# those of spatial dropout are kinds of Dropout
_DROPOUTS = (kl.Dropout, kl.AlphaDropout, kl.GaussianDropout)
_NORMS = (kl.BatchNormalization, kl.LayerNormalization, kl.GroupNormalization, kl.RMSNormalization)


def settings_of(layer: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a layer was made with.

    Args:
        layer: the layer.
        shape: the shape of its input; empty if that is no tensor.
    """
    found: dict[str, Any] = {}
    if isinstance(layer, _NORMS):
        found["epsilon"] = float(layer.epsilon)
    if isinstance(layer, kl.BatchNormalization):
        found["kept statistics"] = round(float(layer.momentum), 12)
    if isinstance(layer, kl.GroupNormalization):
        found["groups"] = layer.groups
    if isinstance(layer, (kl.Dense, *_CONVOLUTIONS)):
        found["bias"] = bool(layer.use_bias)
    if isinstance(layer, _CONVOLUTIONS):
        found |= {"strides": list(layer.strides), "dilation": list(layer.dilation_rate)}
        found["groups"] = layer.groups
        if len(shape) == len(layer.kernel_size) + 2:
            found["padding"] = _padding(layer, shape)
    activation = getattr(layer, "activation", None)
    if isinstance(layer, kl.Activation) and activation is keras.activations.gelu:
        found["gelu"] = "erf"
    if isinstance(layer, kl.LeakyReLU):
        found["negative slope"] = float(layer.negative_slope)
    if isinstance(layer, _DROPOUTS):
        found["rate"] = float(layer.rate)
    if isinstance(layer, kl.MultiHeadAttention):
        found["heads"] = layer.num_heads
    return found


def is_channels_first(layer: Any) -> bool:
    """Return whether a layer takes and gives arrays whose second axis is that of channels."""
    return getattr(layer, "data_format", None) == "channels_first"


def stop_dropout(model: Any) -> list[float]:
    """Let the dropout layers of a model drop nothing; return the rates that they had."""
    rates = []
    for layer in {id(one): one for one in model._flatten_layers()}.values():
        is_dropout = isinstance(layer, _DROPOUTS)
        for name in ("rate", "_dropout", "dropout", "recurrent_dropout"):
            value = vars(layer).get(name)
            if isinstance(value, int | float) and value and (is_dropout or name != "rate"):
                rates.append(float(value))
                setattr(layer, name, 0.0)
    return rates


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer was made with."""
    found: dict[str, Any] = {CLASS: type(optimizer).__name__}
    for name in ("momentum", "epsilon", "nesterov"):
        if hasattr(optimizer, name):
            found[name] = getattr(optimizer, name)
    if hasattr(optimizer, "beta_1"):
        found["betas"] = [float(optimizer.beta_1), float(optimizer.beta_2)]
    if not type(optimizer).__module__.startswith("hvdtrain."):  # the trainer's own have another field
        found["weight decay"] = float(optimizer.weight_decay or 0.0)
    return found


def _padding(layer: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """Return what a convolution adds before and after each spatial axis of inputs of a shape.

    With "same", the output has the size of the input / the stride, and what is odd is added behind.
    """
    sizes = shape[2:] if is_channels_first(layer) else shape[1:-1]
    found = []
    for size, kernel, stride, dilation in zip(
        sizes, layer.kernel_size, layer.strides, layer.dilation_rate, strict=True
    ):
        reach = dilation * (kernel - 1) + 1
        if layer.padding == "same":
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
            found.append([total // 2, total - total // 2])
        else:
            found.append([reach - 1, 0] if layer.padding == "causal" else [0, 0])
    return found
