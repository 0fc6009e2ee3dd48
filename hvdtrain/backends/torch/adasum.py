"""Adasum of what PyTorch's parameters moved. ``tensorflow/`` has the same."""

from collections.abc import Iterable, Sequence

import horovod.torch as hvd
import torch

from hvdtrain.backends.adasum import check_sizes
from hvdtrain.backends.torch.all_reduce import wait_for_all
from hvdtrain.backends.torch.flat import as_reals
from hvdtrain.backends.torch.model_state import Field


class Adasum:
    """Combines what workers have learned, by one message for each portable array.

    A portable array is what the other framework has as one parameter, so that both compute the same.

    Args:
        fields: the trainable parameters as portable arrays.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {}
        taken: set[tuple[int, int]] = set()
        for field in fields:
            views = [
                v for v in map(as_reals, field.views(field.tensors)) if (v.data_ptr(), v.numel()) not in taken
            ]
            taken |= {(view.data_ptr(), view.numel()) for view in views}
            if views:
                self._parts[field.path] = views
        check_sizes({path: sum(_sent_bytes(v) for v in views) for path, views in self._parts.items()})
        self._starts: dict[str, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Note where the workers start from. Local: no collective."""
        self._starts = {path: [view.clone() for view in views] for path, views in self._parts.items()}

    def combine(self) -> None:
        """Collective. Let each parameter move by what the workers' movements combine to."""
        waits = []
        for number, (path, views) in enumerate(self._parts.items()):
            moved = _joined(torch._foreach_sub(views, self._starts[path]))
            handle = hvd.allreduce_async_(moved, op=hvd.Adasum, name=f"hvdtrain.adasum.{number}")
            waits.append(lambda handle=handle: hvd.synchronize(handle))
        for (path, views), combined in zip(self._parts.items(), wait_for_all(waits), strict=True):
            parts = combined.split_with_sizes([view.numel() for view in views])
            for view, start, part in zip(views, self._starts[path], parts, strict=True):
                view.copy_(start + part.view(view.shape))
        self._starts = {}


def _sent_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * torch.promote_types(tensor.dtype, torch.float32).itemsize


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of tensors as one vector, of a type that Horovod combines on every machine."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
