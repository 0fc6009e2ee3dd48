"""What a dry run needs in PyTorch; ``tensorflow/dry_run.py`` does the same for Keras."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

_ACTIVATIONS = {nn.Softmax: "softmax", nn.Softmax2d: "softmax", nn.Sigmoid: "sigmoid"}


class Recorder:
    """Keeps what a model's last call returned, within its context.

    Args:
        model: the model. It is not compiled within the context: a hook would compile it anew.

    Attributes:
        outputs: what the call returned, with arrays in place of tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.outputs: Any = None

    def __enter__(self) -> None:
        self._compiled_call = self.model._compiled_call_impl
        self.model._compiled_call_impl = None
        self._hook = self.model.register_forward_hook(self._record)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self.model._compiled_call_impl = self._compiled_call

    def _record(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        self.outputs = pytree.tree_map_only(torch.Tensor, _as_array, outputs)


def _as_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


@contextmanager
def state_kept(model: nn.Module, device: torch.device, others: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Return a context after which a model and PyTorch's random generators are as they were.

    The copies lie in the host's memory. Those of tensors that lie there take none before one of both changes.

    Args:
        model: the model.
        device: where it computes.
        others: more tensors that are to be as they were.
    """
    more = [(tensor, _kept(tensor)) for tensor in others]
    places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (tensors, name, tensor, _kept(tensor))
        for module in model.modules()
        for tensors in (cast(dict[str, Any], module._parameters), module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    phases = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensors, name, tensor, _ in places:
                    tensors[name] = tensor
                for tensor, value in [*more, *(place[2:] for place in places)]:
                    if torch._C._data_address(tensor) != torch._C._data_address(value):  # type: ignore[attr-defined]
                        tensor.copy_(value)
            for module, phase in phases:
                module.training = phase


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory; PyTorch makes it when one of the two changes, if it can."""
    if tensor.device.type == "cpu":
        with suppress(RuntimeError):  # if something else, such as numpy, has allocated the memory
            return torch._lazy_clone(tensor.detach())
    return tensor.detach().cpu().clone()


def last_activation(model: nn.Module) -> str:
    """Return "softmax" or "sigmoid" if that is the module that a model registered last; else nothing."""
    last = list(model.modules())[-1]
    return _ACTIVATIONS.get(type(last), "")


def count_frozen(model: nn.Module) -> int:
    """Return the number of parameters that training does not change."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
