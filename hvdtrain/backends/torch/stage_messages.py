"""PyTorch's nested tensors as messages between stages; ``tensorflow/stage_messages.py`` does so for Keras."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.pipeline.messages import Bytes, Message
from hvdtrain.errors import TaskError

_TENSOR, _TUPLE, _LIST, _DICT, _VALUE = "tensor", "tuple", "list", "dict", "value"
_PLAIN = (bool, int, float, str, type(None))


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    buffers: list[Bytes] = []
    return Message(_describe(value, buffers), buffers)


def from_message(message: Message, device: torch.device) -> Any:
    """Return the nested tensors of a message."""
    return _made(message.description, iter(message.buffers).__next__, device)


def float_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in float_tensors(part)]


def _describe(value: Any, buffers: list[Bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value.detach(), buffers)
    if type(value) in (tuple, list):
        kind = _TUPLE if type(value) is tuple else _LIST
        return kind, [_describe(part, buffers) for part in value]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return _DICT, {key: _describe(part, buffers) for key, part in value.items()}
    if isinstance(value, _PLAIN):
        return _VALUE, value
    raise TaskError(
        f"a block of the model returns a {type(value).__name__}, which cannot be passed to the next stage",
        "Let blocks return tensors, or tuples, lists and dicts of them.",
        everywhere=True,
    )


def _describe_tensor(tensor: torch.Tensor, buffers: list[Bytes]) -> Any:
    if tensor.layout != torch.strided:
        raise TaskError(
            f"a block of the model returns a tensor of layout {tensor.layout}, which cannot be passed to the "
            "next stage",
            "Let blocks return dense tensors.",
            everywhere=True,
        )
    # as it lies in memory: what is computed from it may depend on that in the last bits
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    laid_out = tensor.permute(order).contiguous().cpu()
    buffers.append(laid_out.reshape(-1).view(torch.uint8).numpy())
    return _TENSOR, str(tensor.dtype).removeprefix("torch."), list(laid_out.shape), order


def _made(description: Any, take: Callable[[], Bytes], device: torch.device) -> Any:
    kind, content, *layout = description
    if kind == _TENSOR:
        shape, order = layout
        flat = torch.from_numpy(np.asarray(take())).view(getattr(torch, content))
        tensor = flat.view(shape).permute([order.index(axis) for axis in range(len(order))])
        return tensor.to(device)
    if kind in (_TUPLE, _LIST):
        parts = [_made(part, take, device) for part in content]
        return tuple(parts) if kind == _TUPLE else parts
    if kind == _DICT:
        return {key: _made(part, take, device) for key, part in content.items()}
    return content
