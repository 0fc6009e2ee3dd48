"""What PyTorch's modules are given and give; ``tensorflow/calls.py`` does the same for Keras's layers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hvdtrain.parity.torch.settings import is_channels_first, settings_of
from hvdtrain.tools.parity.observation import LOSS, MODEL, SOFTMAX, LayerCall

_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)


class Recorder:
    """Keeps the calls of a model's modules, within its context.

    Args:
        model: the model.
        paths: portable path of each module, by its identity.

    Attributes:
        calls: the calls in the order in which they ended.
        outputs: all outputs of the model itself.
        narrow: the layer in which numbers of fp64 were first made fp32; empty if there is none.
    """

    def __init__(self, model: nn.Module, paths: Mapping[int, str]) -> None:
        self.calls: list[LayerCall] = []
        self.outputs: tuple[NDArray[Any], ...] = ()
        self.narrow = ""
        self._model, self._paths = model, paths
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
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.array(tensor.numpy())
