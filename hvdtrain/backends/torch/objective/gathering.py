"""Rows of all workers in PyTorch; ``tensorflow/objective/gathering.py`` does the same for TensorFlow."""

from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from torch import Tensor
from torch.autograd import Function

from hvdtrain.backends.objective import gathering
from hvdtrain.backends.objective.gathering import horovods_own

_Allgather: Any = mpi_ops.HorovodAllgather


class Gathering(gathering.Gathering):
    """Gathers rows for PyTorch's losses."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(self, tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
        counted = self._weights > 0
        any_counts, sent = bool(counted.any()), tensor
        if any_counts and len(tensor) == len(counted):
            sent = tensor[counted]
        if self._workers.size > 1:
            sent = sent if any_counts else sent[:0]
            counts = _counts(len(sent), name)
            gathered, first = _Gather.apply(sent, name, counts), sum(counts[: self._workers.rank])  # type: ignore[no-untyped-call]
            if not any_counts:  # samples of weight 0 are compared with something, too
                gathered, first = torch.cat((gathered, tensor)), len(gathered)
        else:
            gathered, first = sent, 0
        own = torch.arange(len(tensor), device=tensor.device) + first
        return gathered, own.clamp(max=max(0, len(gathered) - 1))


class _Gather(Function):
    """The rows of all workers. Its backward pass sums what all workers give to this worker's rows.

    The gradient of a step is the sum over workers of the gradients of their losses, so that is exact.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        """Collective. Return the rows of all workers."""
        ctx.name, ctx.counts = name, counts
        joined = mpi_ops.synchronize(mpi_ops.allgather_async(_as_bytes(rows), name))
        return _from_bytes(joined, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Collective. Return the gradient of this worker's rows."""
        return _Scatter.apply(gradient, ctx.name, ctx.counts), None, None  # type: ignore[no-untyped-call]


class _Scatter(Function):
    """The sum over workers of what they have for the rows of this worker."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        """Collective. Return the sum for this worker's rows."""
        ctx.name, ctx.counts = name, counts
        splits = torch.tensor(counts, dtype=torch.int32)
        received, _ = hvd.alltoall(_as_bytes(rows), splits, name=f"{name}.backward")
        parts = _from_bytes(received, rows).reshape(len(counts), counts[hvd.rank()], *rows.shape[1:])
        return parts.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Collective. Return the gradient of what this worker gave."""
        return _Gather.apply(gradient, ctx.name, ctx.counts), None, None  # type: ignore[no-untyped-call]


def _counts(rows: int, name: str) -> list[int]:
    """Collective. Return the number of rows of each worker."""
    own = torch.tensor([rows])
    counts: list[int] = mpi_ops.synchronize(mpi_ops.allgather_async(own, f"{name}.rows")).tolist()
    return counts


def _as_bytes(rows: Tensor) -> Tensor:
    """Return rows of any type as (rows, bytes)."""
    flat = rows.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(len(rows), rows.shape[1:].numel() * rows.element_size())


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    return (
        data.reshape(-1).view(like.dtype).reshape(-1 if like[:0].dim() == 1 else len(data), *like.shape[1:])
    )


class _Checked(_Allgather):
    """Horovod's allgather, which in a loss of several workers is refused."""

    @classmethod
    def apply(cls, tensor: Tensor, name: str | None, process_set: Any) -> Any:
        """Collective. Return the rows of all workers."""
        built = gathering.Gathering.built
        if built is not None and built.is_in_loss_of_several and process_set is mpi_ops.global_process_set:
            raise horovods_own()
        return _Allgather.apply(tensor, name, process_set)


mpi_ops.HorovodAllgather = _Checked
