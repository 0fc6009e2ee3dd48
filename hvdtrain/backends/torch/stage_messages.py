"""PyTorch's nested tensors as messages between stages; ``tensorflow/stage_messages.py`` does so for Keras."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.pipeline.messages import Bytes, Message
from hvdtrain.backends.pipeline.nested import pack, unpack
from hvdtrain.errors import TaskError


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    return pack(value, lambda part: isinstance(part, torch.Tensor), _describe)


def from_message(message: Message, device: torch.device) -> Any:
    """Return the nested tensors of a message."""
    return unpack(message, lambda description, buffer: _make(description, buffer).to(device))


def float_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in float_tensors(part)]


def _describe(tensor: torch.Tensor) -> tuple[Any, Bytes]:
    if tensor.layout != torch.strided:
        raise TaskError(
            f"a block of the model returns a tensor of layout {tensor.layout}, which cannot be passed to the "
            "next stage",
            "Let blocks return dense tensors.",
        )
    tensor = tensor.detach()
    # as it lies in memory: what is computed from it may depend on that in the last bits
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    laid_out = tensor.permute(order).contiguous().cpu()
    description = str(tensor.dtype).removeprefix("torch."), list(laid_out.shape), order
    return description, laid_out.reshape(-1).view(torch.uint8).numpy()


def _make(description: Any, buffer: Bytes) -> torch.Tensor:
    kind, shape, order = description
    dtype = getattr(torch, kind)
    flat = torch.from_numpy(np.asarray(buffer)).view(dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    return flat.view(shape).permute([order.index(axis) for axis in range(len(order))])
