"""What a dry run needs in PyTorch; ``tensorflow/dry_run.py`` does the same for Keras."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from hvdtrain.backends.torch.state.model_state import set_values
from hvdtrain.backends.torch.task_model import LOSS
from hvdtrain.data.feed import HostBatch
from hvdtrain.storage.text import some

_NAMED = 3  # of modules, at most
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
        self.outputs = pytree.tree_map_only(torch.Tensor, as_array, outputs)


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array; of half precision as fp32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


@contextmanager
def state_kept(model: nn.Module, device: torch.device, others: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Return a context after which a model and PyTorch's random generators are as they were.

    So are the attributes of its modules, such as a flag that says whether they have been called. The mode is
    restored by ``train()`` or ``eval()``, which may change more than flags. The copies lie in the
    host's memory. Those of tensors that lie there take none before one of both changes.

    Args:
        model: the model.
        device: where it computes.
        others: more tensors that are to be as they were.
    """
    more = [(tensor, as_kept(tensor)) for tensor in others]
    places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (tensors, name, tensor, as_kept(tensor, tensors is module._buffers))
        for module in model.modules()
        for tensors in (cast(dict[str, Any], module._parameters), module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    mode, attributes = model.training, [(vars(module), dict(vars(module))) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            if model.training is not mode:
                (model.train if mode else model.eval)()
            for tensors, name, tensor, _ in places:
                tensors[name] = tensor
            for tensor, value in [*more, *(place[2:] for place in places)]:
                if address_of(tensor) != address_of(value):
                    set_values(tensor, value)
            for now, before in attributes:
                now.clear()
                now.update(before)


def copied(batch: HostBatch) -> HostBatch:
    """Return a batch whose arrays a model may change: the tensors of the CPU lie in the arrays' memory."""
    return replace(batch, arrays={name: array.copy() for name, array in batch.arrays.items()})


def changed_in_place(batch: HostBatch, micro_batch: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of those tensors that are not what the first micro-batch of a batch holds."""
    return tuple(
        name
        for name, tensor in micro_batch.items()
        if not np.array_equal(
            tensor.detach().cpu().numpy(), batch.arrays[name][0], equal_nan=tensor.is_floating_point()
        )
    )


def as_kept(tensor: torch.Tensor, is_buffer: bool = False) -> torch.Tensor:
    """Return a copy in the host's memory; PyTorch makes it when one of the two changes, if it can.

    Of a buffer it is made at once: PyTorch could not resize one of the two, as observers of quantisation do.
    """
    if tensor.device.type == "cpu" and not is_buffer:
        with suppress(RuntimeError):  # if something else, such as numpy, has allocated the memory
            return torch._lazy_clone(tensor.detach())
    return tensor.detach().cpu().clone()


def address_of(tensor: torch.Tensor) -> int:
    """Return where the values lie; of a sparse tensor, a number of its own."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def parts_in_evaluation(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules in evaluation mode, by name, of a model that is in training mode."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if model.training else ():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def describe_undone(before: Mapping[str, nn.Module]) -> str:
    """Return a note of modules that ``train()`` has put into training mode; empty if there are none.

    Args:
        before: what ``parts_in_evaluation`` returned before the call.
    """
    undone = [f"{name} ({type(module).__name__})" for name, module in before.items() if module.training]
    if not undone:
        return ""
    return (
        f"train() is called before the first step, as in every trainer, and puts {some(undone, _NAMED)} into "
        "training mode; torch_model() had put that into evaluation mode. To keep it there, override train() "
        "of the model"
    )


def last_activation(model: nn.Module) -> str:
    """Return "softmax" or "sigmoid" if that is the module that a model registered last; else nothing."""
    last = [module for name, module in model.named_modules() if name.partition(".")[0] != LOSS][-1]
    return _ACTIVATIONS.get(type(last), "")


def count_frozen(model: nn.Module) -> int:
    """Return the number of parameters that training does not change."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
