"""Looking into a model of PyTorch; ``tensorflow.py`` does the same for Keras."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.modules import pooling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.torch.objective.losses import NAMED
from hvdtrain.backends.torch.precision import autocast
from hvdtrain.backends.torch.probes import as_array, state_kept
from hvdtrain.backends.torch.state.model_state import Field, ModelState
from hvdtrain.config import Config
from hvdtrain.tools.parity.findings import CLASS
from hvdtrain.tools.parity.observation import LOSS, MODEL, SOFTMAX, CallRecorder, ForwardPass, LayerCall
from hvdtrain.tools.parity.probe import Probe as ProbeBase
from hvdtrain.tools.parity.probe import layer_paths

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


_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)


class Recorder(CallRecorder):
    """Keeps the calls of a model's modules, within its context."""

    def __init__(self, model: nn.Module, paths: Mapping[int, str]) -> None:
        super().__init__(model, paths)
        self._inputs: list[tuple[str, NDArray[Any] | None]] = []  # of the layers that run, with their paths
        self._hooks: list[Any] = []
        self._functions: Any = _Functions(self._softmax, self._cast)

    def __enter__(self) -> "Recorder":
        for module in {id(m): m for m in self._model.modules()}.values():
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        path = self._paths.get(id(module), "")
        self._inputs.append((path, first_array((args, kwargs))))  # now: the module may change it in place

    def _after(self, module: nn.Module, _args: Any, outputs: Any) -> None:
        path, inputs = self._inputs.pop()
        if module is self._model and not self.outputs:
            self.outputs = tuple(all_arrays(outputs))
        self.calls.append(
            LayerCall(
                path,
                type(module).__name__,
                settings_of(module, () if inputs is None else inputs.shape),
                inputs,
                first_array(outputs),
                channels_first=is_channels_first(module),
            )
        )

    def _softmax(self, probabilities: torch.Tensor) -> None:
        if self._inputs:  # within the model
            self.calls.append(LayerCall(SOFTMAX, "softmax", {}, None, first_array(probabilities)))

    def _cast(self) -> None:
        path = (self._inputs[-1][0] or MODEL) if self._inputs else LOSS
        self.narrow = self.narrow or path


class _Functions(TorchFunctionMode):
    """Tells of the probabilities that softmax and attention compute, and of casts from fp64 to fp32."""

    def __init__(self, tell: Callable[[torch.Tensor], None], tell_of_cast: Callable[[], None]) -> None:
        super().__init__()
        self._tell, self._tell_of_cast = tell, tell_of_cast

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _SOFTMAXES:
            self._tell(found)
        elif func is F.scaled_dot_product_attention:
            self._tell(_probabilities(*args, **(kwargs or {})))
        if _dtype(found) == torch.float32 and _dtype(args[0] if args else None) == torch.float64:
            self._tell_of_cast()
        return found


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _probabilities(  # noqa: PLR0917 - as PyTorch has them
    query: torch.Tensor,
    key: torch.Tensor,
    _value: Any = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_others: Any,
) -> torch.Tensor:
    """Return what scaled_dot_product_attention multiplies the values with."""
    if key.shape[:-2] != query.shape[:-2]:  # grouped queries
        return torch.zeros(0)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1)


def first_array(value: Any) -> NDArray[Any] | None:
    """Return a copy of the first tensor in a structure; None if there is none."""
    return next(all_arrays(value), None)


def all_arrays(value: Any) -> Iterator[NDArray[Any]]:
    """Yield copies of the tensors in a structure; those of a dictionary in the order of its keys."""
    if isinstance(value, torch.Tensor):
        yield to_array(value)
    elif isinstance(value, Mapping):  # PyTorch's own walk has them as they were put in
        for name in sorted(value, key=str):
            yield from all_arrays(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from all_arrays(one)
    else:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield to_array(leaf)


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy of a tensor as an array; of half precision as fp32."""
    return np.array(as_array(tensor))


Arrays = Mapping[str, NDArray[Any]]


@contextmanager
def in_fp64() -> Iterator[None]:
    """Return a context in which models are made that compute in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Probe(ProbeBase):
    """Looks into a model that the backend has built."""

    def __init__(self, backend: Backend, task: Any, config: Config) -> None:
        super().__init__(backend, task, config, NAMED)
        self._device = next(self._model.parameters()).device
        tensors = ModelState(self._model, self._renaming)
        self._fields = list(tensors.trainable_fields())
        self._paths = layer_paths(
            (
                (name.replace(".", "/"), id(module))
                for name, module in self._model.named_modules(remove_duplicate=False)
            ),
            ((field.own, field.path) for field in tensors.fields),
            self._renaming,
        )

    def forward(self, arrays: Arrays) -> tuple[ForwardPass, ForwardPass]:
        """Return two forward passes in evaluation with the same samples."""
        with state_kept(self._model, self._device):
            self._model.eval()
            return self._forward(arrays), self._forward(arrays)

    def losses_in_training(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, float]:
        """Return the mean losses of two passes in training, which draw random numbers one after the other."""
        with state_kept(self._model, self._device), torch.no_grad():
            self._model.train()
            before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            first = float(self._mean_loss(arrays, weights))
            for buffer, value in before:  # such as moving statistics
                buffer.copy_(value)
            return first, float(self._mean_loss(arrays, weights))

    def gradients(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, PortableState]:
        """Return the mean loss in training and its gradient by portable names."""
        tensors = [tensor for field in self._fields for tensor in field.tensors]
        parameters = list({id(tensor): tensor for tensor in tensors}.values())
        with state_kept(self._model, self._device):
            self._model.train()
            loss = self._mean_loss(arrays, weights)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        by_tensor = {
            id(tensor): torch.zeros_like(tensor) if gradient is None else gradient.to_dense()
            for tensor, gradient in zip(parameters, found, strict=True)
        }
        return float(loss.detach()), {field.name: _gradient(field, by_tensor) for field in self._fields}

    def optimizer(self) -> dict[str, Any]:
        """Return what the optimizer was made with, under names that both frameworks share."""
        return optimizer_settings(self._backend.optimizers[0])

    def _forward(self, arrays: Arrays) -> ForwardPass:
        # with gradients: without, attention takes a way of its own that training does not take
        with Recorder(self._model, self._paths) as recorder, autocast(self._precision, self._device):
            losses, _ = self._objective(self._model, self._on_device(arrays))
        values = losses.values if isinstance(losses, Weighted) else losses
        return recorder.forward_pass(to_array(values))

    def _mean_loss(self, arrays: Arrays, weights: NDArray[Any]) -> torch.Tensor:
        with autocast(self._precision, self._device):
            losses, _ = self._train_objective(self._model, self._on_device(arrays))
        own: torch.Tensor | None = None
        values: torch.Tensor = losses
        if isinstance(losses, Weighted):
            values, own = losses.values, torch.as_tensor(losses.weights).detach()
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        values = values.to(wide)
        if values.dim() == 0:
            return values
        counted = torch.as_tensor(weights, device=self._device).to(wide)
        counted = counted if own is None else counted * own.to(wide)
        return (values * counted).sum() / counted.sum()

    def _on_device(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(array)).to(self._device) for name, array in arrays.items()}


def _gradient(field: Field, gradients: Mapping[int, torch.Tensor]) -> NDArray[Any]:
    """Return the gradient of one portable array."""
    layout = field.layout.of_slots or field.layout
    parts = [to_array(view) for view in field.views([gradients[id(t)] for t in field.tensors])]
    return np.array(layout.to_portable(parts))
