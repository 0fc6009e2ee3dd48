"""What PyTorch's modules were made with; ``tensorflow/settings.py`` uses the same names."""

from typing import Any

from torch import nn, optim
from torch.nn.modules import pooling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from hvdtrain.tools.parity.findings import CLASS

_OF_CHANNELS_FIRST = (
    *(_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm, nn.Dropout2d, nn.Dropout3d),
    *(pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveMaxPoolNd, pooling._AdaptiveAvgPoolNd),
    *(pooling._LPPoolNd, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)


def settings_of(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a module was made with.

    Args:
        module: the module.
        shape: the shape of its input; empty if that is no tensor.
    """
    found: dict[str, Any] = {}
    if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) and module.eps is not None:
        found["epsilon"] = float(module.eps)
    if isinstance(module, _BatchNorm) and module.track_running_stats:
        found["kept statistics"] = None if module.momentum is None else round(1 - module.momentum, 12)
    if isinstance(module, nn.GroupNorm):
        found["groups"] = module.num_groups
    if isinstance(module, (nn.Linear, _ConvNd)):
        found["bias"] = module.bias is not None
    if isinstance(module, _ConvNd) and not module.transposed:
        found |= {"strides": list(module.stride), "dilation": list(module.dilation), "groups": module.groups}
        found["padding"] = _padding(module)
    if isinstance(module, nn.GELU):
        found["gelu"] = "tanh" if module.approximate == "tanh" else "erf"
    if isinstance(module, nn.LeakyReLU):
        found["negative slope"] = float(module.negative_slope)
    if isinstance(module, _DropoutNd):
        found["rate"] = float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        found["heads"] = module.num_heads
    return found


def is_channels_first(module: nn.Module) -> bool:
    """Return whether a module takes and gives arrays whose second axis is that of channels.

    Of other modules, such as the user's, that is not known.
    """
    return isinstance(module, _OF_CHANNELS_FIRST)


def stop_dropout(model: nn.Module) -> list[float]:
    """Let the dropout layers of a model drop nothing; return the rates that they had."""
    rates = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            rates.append(float(module.p))
            module.p = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rates.append(float(module.dropout))
            module.dropout = 0.0
    return [rate for rate in rates if rate]


def optimizer_settings(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer was made with."""
    group = optimizer.param_groups[0]
    found: dict[str, Any] = {CLASS: type(optimizer).__name__}
    names = {"momentum": "momentum", "eps": "epsilon", "nesterov": "nesterov", "dampening": "dampening"}
    for name, shared in names.items():
        if name in group:
            found[shared] = group[name]
    if "betas" in group:
        found["betas"] = [float(beta) for beta in group["betas"]]
    if "weight_decay" in group:  # groups without it are for biases and the like
        found["weight decay"] = max(float(one["weight_decay"]) for one in optimizer.param_groups)
    return found


def _padding(module: Any) -> list[list[int]]:
    """Return what a convolution adds before and after each spatial axis."""
    if module.padding == "valid":
        return [[0, 0] for _ in module.kernel_size]
    if module.padding == "same":  # PyTorch has it for strides of 1 alone
        sums = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [[total // 2, total - total // 2] for total in sums]
    return [[int(width), int(width)] for width in module.padding]
